"""Training of models with attention on 3 ranks against torch in one process: by the native kernel, and in float64."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr

HEADS, WIDTH, ROWS = 5, 7, 53
"""Heads are split 2, 2 and 1."""


class Mixer(nn.Module):
    """Attention of all kinds: plain, causal, with keys in groups, with a mask, and with a bias that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH) for _ in range(5)])
        self.down = nn.ModuleList([nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(5)])
        self.bias = nn.Parameter(torch.randn(1, HEADS, ROWS, ROWS))

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options: list[dict[str, Any]] = [{}, {"is_causal": True}, {}, {"attn_mask": mask}, {"attn_mask": self.bias}]
        for number, (up, down, option) in enumerate(zip(self.up, self.down, options, strict=True)):
            q, k, v = up(x).view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            if number == 2:
                k, v = (z[:, :1].expand(-1, HEADS, -1, -1) for z in (k, v))
            z = F.scaled_dot_product_attention(q, k, v, **option)
            x = x + down(z.transpose(1, 2).flatten(2))
        return (x * y).mean()


def trained(dtype: torch.dtype, **options: Any) -> dr.TrainingStep:
    """Train by us and by torch; fail unless losses and parameters agree."""
    torch.manual_seed(0)
    model = Mixer().to(dtype).train()
    shape = (7, ROWS, HEADS * WIDTH)
    mask = (torch.rand(7, 1, ROWS, ROWS) < 0.7) | torch.eye(ROWS, dtype=torch.bool)
    batches = [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), mask) for _ in range(2)]
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


def count(step: dr.TrainingStep, name: str) -> int:
    functions = step.plan.modules["ranked"].functions
    return sum(op.name == name for function in functions for op in function.ops) // len(functions)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", ["3/1/1/1", "1/3/1/1", "3/1/1/1,zero=3,checkpoint=selective"])
def test_gradients_of_attention(strategy: str, dtype: torch.dtype) -> None:
    assert count(trained(dtype, strategy=strategy), "attention_grad") == 4


def test_query_rows_are_split() -> None:
    """Gradients of keys and values are sums over the ranks' query rows, which are not gathered."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (7, 5, 5))
    model = nn.ParameterDict({"q": q, "k": k, "v": v})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = model

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return (F.scaled_dot_product_attention(self.of["q"], self.of["k"], self.of["v"]) * y).sum()

    y = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    step = dr.compile_training(
        Model(), optimizer=dr.optim.SGD(lr=1.0), example_batch=(y,), mesh=3, shardings={"of.q": "S[2]", "y": "S[2]"}
    )
    before = deepcopy(model)
    Model()(y).backward()
    step(y)
    for name in model:
        torch.testing.assert_close(step.parameters()[f"of.{name}"], (before[name] - model[name].grad).detach())
    assert count(step, "attention_grad") == 1
    assert not count(step, "all_gather")
