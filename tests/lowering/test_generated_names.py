"""Names of functions in generated programs: a module may be called as a word of Python is."""

from __future__ import annotations

import pytest
import torch

import distir_relax as dr
from distir_relax.runtime.session import Session


class Lambda(torch.nn.Module):
    """Its function is called ``lambda``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Größe(Lambda):
    """Its function has other letters than those of English."""


@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("kind", [Lambda, Größe])
def test_modules_may_have_any_name(kind: type[Lambda], backend: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(kind() for _ in range(3)))
    x = torch.randn(4, 5)
    plan = dr.compile(model, (x,), strategy="1/3/1/1")
    assert any("lambda" in f.name or "größe" in f.name for f in plan.modules["ranked"].functions)
    (result,) = Session(plan.bundle((backend,)), backend)({"input": x}).values()
    torch.testing.assert_close(result, model(x))
