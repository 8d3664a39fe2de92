"""Training of models with norms on 3 ranks against torch in one process: by native kernels, and by torch in float64."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr

WIDTH = 127


class SpelledNorm(nn.Module):
    """An RMS norm as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([
            nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, 1e-5), SpelledNorm(), nn.LayerNorm(WIDTH, bias=False),
            nn.LayerNorm(WIDTH, elementwise_affine=False), nn.LayerNorm((5, WIDTH)),
        ])  # fmt: skip
        self.up, self.down = nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x + self.down(torch.relu(self.up(norm(x))))
        return (x * y).mean()


def trained(dtype: torch.dtype, rows: int, **options: Any) -> dr.TrainingStep:
    """Train by us and by torch; fail unless losses and parameters agree."""
    torch.manual_seed(0)
    model = Mixer().to(dtype).train()
    batches = [tuple(torch.randn(9, rows, 5, WIDTH, dtype=dtype) for _ in range(2)) for _ in range(2)]
    own = deepcopy(model)
    optimizer, losses = torch.optim.SGD(own.parameters(), lr=1.0), []
    for batch in batches:
        optimizer.zero_grad()
        loss = own(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    step = dr.compile_training(model, optimizer=dr.optim.SGD(lr=1.0), example_batch=batches[0], **options)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close([step(batch) for batch in batches], losses, rtol=tolerance, atol=tolerance)
    expected = dict(own.named_parameters())
    for name, tensor in step.parameters().items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=tolerance, atol=tolerance)
    return step


def names(step: dr.TrainingStep) -> set[str]:
    return {op.name for function in step.plan.modules["ranked"].functions for op in function.ops}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 18), (torch.float64, 3)])
@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/3/1/1", "3/1/1/1,zero=3"])
def test_gradients_of_norms(strategy: str, dtype: torch.dtype, rows: int) -> None:
    ops = names(trained(dtype, rows, strategy=strategy))
    assert {f"{norm}_norm{end}" for norm in ("layer", "rms") for end in ("_grad", "_weight_grad")} <= ops
    assert "rsqrt" not in ops


def test_norms_of_split_rows_are_summed_in_parts() -> None:
    """The mean of a norm that is written op by op: its parts are summed, and no row is gathered."""
    torch.manual_seed(0)
    norm = SpelledNorm().double()
    x, y = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    (norm(x) * y).sum().backward()
    step = dr.compile_training(
        norm, lambda out, y: (out * y).sum(), optimizer=dr.optim.SGD(lr=1.0), example_batch=(x, y), mesh=3,
        shardings={"x": "S[1]"},
    )  # fmt: skip
    before = norm.weight.detach().clone()
    step(x, y)
    torch.testing.assert_close(step.parameters()["weight"], before - norm.weight.grad)
    assert "rsqrt" in names(step)
    assert "all_gather" not in names(step)
