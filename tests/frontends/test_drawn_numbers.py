"""Models that draw from generators of Python or NumPy are refused with the line; those that draw elsewhere are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch import import_torch

DRAWS: dict[str, Callable[[Any], float]] = {
    "Python's random": lambda model: random.random(),
    "numpy.random": lambda model: float(np.random.uniform()),
    "the generator inner.python": lambda model: model.python.random(),
    "the generator inner.numpy": lambda model: float(model.numpy.random()),
    "the generator inner.old": lambda model: float(model.old.rand()),
}


class Inner(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(5, 5), draw
        self.python, self.numpy, self.old = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        scale = sorted([2.0, self.draw(self)])[0]  # the line
        return y * scale


class Model(nn.Module):
    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner = Inner(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


def line() -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, text in enumerate(file, 1) if "# the line" in text)


@pytest.mark.parametrize("name", DRAWS)
def test_draw_is_refused_with_its_line(name: str) -> None:
    model = Model(DRAWS[name])
    states = random.getstate(), np.random.get_state()[2], model.inner.python.getstate()
    with pytest.raises(ImportModelError, match=f"draws numbers from {name} in its forward") as caught:
        dr.compile_training(
            model,
            nn.functional.mse_loss,
            optimizer=dr.optim.SGD(0.1),
            example_batch=(torch.randn(3, 5), torch.randn(3, 5)),
        )
    # The draw is in a function of this file that is called from that line.
    place = caught.value.where
    assert place.startswith("test_drawn_numbers.py:")
    assert int(place.rpartition(":")[2]) in (line(), DRAWS[name].__code__.co_firstlineno)
    assert states == (random.getstate(), np.random.get_state()[2], model.inner.python.getstate())


def test_draw_by_the_loss_is_refused() -> None:
    def loss(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((y - targets) * random.random()).mean()

    with pytest.raises(ImportModelError, match="draws numbers from Python's random") as caught:
        dr.compile_training(nn.Linear(5, 5), loss, optimizer=dr.optim.SGD(0.1), example_batch=(torch.ones(3, 5),) * 2)
    assert caught.value.where.startswith("test_drawn_numbers.py:")


def test_generators_that_do_not_advance_are_accepted() -> None:
    model = Model(lambda model: 0.5)
    random.random()
    imported = import_torch(model, (torch.ones(3, 5),))
    assert [op.name for op in imported.module.main.ops][-1] == "add"


def test_draw_of_another_thread_is_not_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it came between the beginning and the end of the export."""
    export = torch.export.export

    def drawing(*args: Any, **kwargs: Any) -> Any:
        random.random()
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", drawing)
    imported = import_torch(Model(lambda model: 0.5), (torch.ones(3, 5),))
    assert [op.name for op in imported.module.main.ops][-1] == "add"
