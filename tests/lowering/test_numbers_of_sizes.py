"""Sizes as numbers of a computation: next to every operator of torch, on both sides, in programs of both backends."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distir_relax as dr

SIZES: dict[str, Callable[[Any], Any]] = {
    "product": lambda n: 2 * n,
    "difference": lambda n: n - 5,
    "negative": lambda n: -n,
    "quotient": lambda n: n // 2 + 1,
}
OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
             operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]  # fmt: skip


class Uses(torch.nn.Module):
    """Applies each operator to a tensor and a number of its size, in both orders."""

    def __init__(self, number: Callable[[Any], Any]) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        number = torch.tensor(1) * self.number(x.shape[0])
        return [y for use in OPERATORS for y in (use(x, number), use(number, x), use(x, self.number(x.shape[0])))]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "backend"), [*((name, "torch") for name in SIZES), ("quotient", "tvm")])
def test_a_number_of_a_size_is_one_operand(name: str, backend: str) -> None:
    model = Uses(SIZES[name])
    plan = dr.compile(model, (torch.ones(4, 3),), dynamic_shapes={"x": {0: dr.Dim("n", min=2)}}, mesh=1)
    for size in (4, 7, 2, 13):
        x = torch.arange(1.0, 1 + 3 * size).reshape(size, 3) * 0.7
        torch.testing.assert_close(plan(x, backend=backend), model(x))
