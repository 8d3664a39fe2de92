"""Programs of which nothing is split are laid out without a search, as the search lays them out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.pass_manager import Observer
from distir_relax.errors import PlacementError
from distir_relax.ir import Module
from distir_relax.layout import DeviceMesh
from distir_relax.sharding import Propagate, propagate
from distir_relax.sharding.replicated import is_fully_replicated
from tests.blocks import blocks_module


class Before(Observer):
    """The last program of the global stage."""

    def end(self, number: int, step: object, module: Module, seconds: float) -> None:
        if module.stage == "global":
            self.module = module


class Tied(nn.Module):
    """Blocks with a norm, a weight used twice, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6)) for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return (x @ self.layers[0][2].weight).reshape(-1, 13).square().mean()


def step(strategy: str) -> Module:
    before = Before()
    torch.manual_seed(0)
    dr.compile_training(
        Tied(), optimizer=dr.optim.AdamW(), clip_norm=1.0, example_batch=torch.randn(7, 6), strategy=strategy,
        observers=[before],
    )  # fmt: skip
    return before.module


@pytest.mark.parametrize("strategy", ["1/1/1/1", "1/1/1/3", "1/1/3/4"])
def test_it_is_what_the_search_finds(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = step(strategy)
    mesh = module.meshes[0]
    assert is_fully_replicated(module, mesh)
    found = Propagate(mesh).run(module)
    monkeypatch.setattr(propagate, "is_fully_replicated", lambda module, mesh: False)
    assert found == Propagate(mesh).run(module)
    assert len(found.functions) > 1 or strategy == "1/1/1/1"


def test_marks_for_the_whole_are_marks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = blocks_module(3, "R")
    mesh = DeviceMesh((5,), ("tp",))
    assert is_fully_replicated(module, mesh)
    found = Propagate(mesh).run(module)
    monkeypatch.setattr(propagate, "is_fully_replicated", lambda module, mesh: False)
    assert found == Propagate(mesh).run(module)


def test_a_split_is_searched_for_and_what_does_not_fit_is_an_error() -> None:
    mesh = DeviceMesh((3,), ("tp",))
    assert not is_fully_replicated(blocks_module(2, "S[1]"), mesh)
    assert not is_fully_replicated(blocks_module(2, "I"), mesh)
    with pytest.raises(PlacementError, match="dim"):
        Propagate(mesh).run(blocks_module(2, "S[2]"))
    with pytest.raises(PlacementError, match="one placement for each"):
        Propagate(mesh).run(blocks_module(2, "R, R"))
