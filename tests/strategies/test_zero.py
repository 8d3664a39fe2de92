"""ZeRO leaves the smallest parameters replicated, and reduces their gradients together."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.strategies.zero import _large_parameters

WIDTHS = (601, 599, 603, 597)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for a, b in pairwise(WIDTHS) for part in (nn.LayerNorm(a), nn.Linear(a, b))]).double()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_biases_and_norms_are_replicated(zero: int) -> None:
    model = perceptron()
    batches = [(torch.randn(7, WIDTHS[0]).double(), torch.randn(7, WIDTHS[-1]).double()) for _ in range(2)]
    own = deepcopy(model)
    optimizer, losses = torch.optim.AdamW(own.parameters(), lr=0.01), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(own(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(own.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    step = dr.compile_training(
        model, nn.functional.mse_loss, optimizer=dr.optim.AdamW(lr=0.01), example_batch=batches[0], clip_norm=0.1,
        strategy=f"3/1/1/1,zero={zero}",
    )  # fmt: skip
    torch.testing.assert_close([step(*batch) for batch in batches], losses)
    for name, tensor in step.parameters().items():
        torch.testing.assert_close(tensor, dict(own.named_parameters())[name].detach())
    placed = {tensor.name: tensor.placement for tensor in step.plan.bundle().manifest.weights}
    for name in dict(own.named_parameters()):
        assert placed[name].startswith("R") == (own.get_parameter(name).dim() == 1), placed[name]
        assert placed[f"{name}.exp_avg"] == placed[name]
    (first, *_) = step.plan.modules["ranked"].functions
    counts = Counter(op.name.removeprefix("start_") for op in first.ops)
    # Each matrix is gathered once, or in the forward and in the backward.
    assert counts["all_gather"] == (6 if zero == 3 else 3)
    assert counts["reduce_scatter"] == (0 if zero == 1 else 3)
    # The loss, the squares of all shards of gradients as one sum, and the gradients that are replicated.
    scalars = [op for op in first.ops if op.name.endswith("all_reduce") and not op.results[0].tensor.shape]
    assert len(scalars) <= 2
    assert counts["all_reduce"] - len(scalars) <= (12 if zero == 1 else 9)


class Block(nn.Module):
    """A feed-forward net with a residual; its products have biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(127), nn.Linear(127, 509), nn.Linear(509, 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_master_weights_are_gathered_in_the_dtype_of_the_model() -> None:
    """Their casts are computed on the shards, and activations stay split by sample, also after a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    batch = torch.randn(15, 127), torch.randn(15, 127)
    losses = {}
    for strategy in ("1/1/1/1", "5/1/1/1,zero=3"):
        step = dr.compile_training(
            deepcopy(model), nn.functional.mse_loss, optimizer=dr.optim.AdamW(lr=0.01), example_batch=batch,
            strategy=strategy, precision="bf16",
        )  # fmt: skip
        losses[strategy] = [step(*batch) for _ in range(3)]
    torch.testing.assert_close(*losses.values(), rtol=0.02, atol=0.0)
    ops = [op for function in step.plan.modules["distributed"].functions for op in function.ops]
    assert not any(op.name == "all_to_all" for op in ops)
    gathered = [op.results[0].placed for op in ops if op.name == "all_gather"]
    matrices = [value.dtype for value in gathered if len(value.local(0).shape) == 2]
    # Six matrices, for the forward and for the backward, but those of the first product's operand.
    assert set(matrices) == {"bfloat16"}
    assert len(matrices) == 12


def test_small_parameters_have_a_limit_together() -> None:
    """They are at most a 64th of a rank's shards: with more ranks, fewer are replicated."""
    plan = dr.compile_training(
        perceptron(), nn.functional.mse_loss, optimizer=dr.optim.SGD(lr=0.1), strategy="1/1/1/1",
        example_batch=(torch.randn(7, WIDTHS[0]).double(), torch.randn(7, WIDTHS[-1]).double()),
    ).plan  # fmt: skip
    module = plan.modules["global"] if "global" in plan.modules else next(iter(plan.modules.values()))
    sizes = {i.value.name: i.value.tensor.elements for i in module.main.inputs if i.role == "parameter"}
    for ranks in (2, 3, 7, 1000):
        whole = sizes.keys() - _large_parameters(module, ranks)
        assert sum(sizes[name] for name in whole) <= sum(sizes.values()) / (64 * ranks)
        assert len(whole) == {2: 9, 3: 9, 7: 4, 1000: 0}[ranks]
