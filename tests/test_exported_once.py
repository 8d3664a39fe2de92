"""Exports that tests share are those of models that differ in numbers alone, with the tensors of each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distir_relax as dr
from tests import exported_once


class Scaled(nn.Module):
    """A layer, a buffer, and what a program has as constants: a number, a function."""

    def __init__(self, scale: float, function: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.scale, self.function, self.layer = scale, function, nn.Linear(5, 3)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x) * self.scale) + self.shift


def power(exponent: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x**exponent


def test_programs_are_shared_by_models_that_differ_in_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[int] = []
    original = exported_once._EXPORT

    def counted(*arguments: Any) -> Any:
        exported.append(len(exported))
        return original(*arguments)

    monkeypatch.setattr(exported_once, "_EXPORT", counted)
    tied = Scaled(2.5)
    tied.layer.bias = nn.Parameter(tied.shift)
    models = [
        (Scaled(2.5), 4, 1), (Scaled(2.5), 4, 1), (Scaled(3.5), 4, 2), (Scaled(2.5), 7, 3), (tied, 4, 4),
        (Scaled(2.5, power(2)), 4, 5), (Scaled(2.5, power(3)), 4, 6), (Scaled(2.5, power(2)), 4, 6),
    ]  # fmt: skip
    for model, rows, count in models:
        x = torch.randn(rows, 5)
        plan = dr.compile(model.eval(), (x,), strategy="1/3/1/1")
        torch.testing.assert_close(plan(x), model(x).detach())
        assert len(exported) == count


def test_a_tensor_of_the_model_s_own_is_in_no_key() -> None:
    model = Scaled(2.5)
    model.scale = torch.tensor([1.0, 2.0, 3.0])  # type: ignore[assignment]
    assert exported_once._key(model, (torch.ones(2, 5),), {}, None, {}) is None
