"""Distances, diagonals, bags, ranks and scans in models: split in uneven ways, on both backends, and trained."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr

ROWS, WIDTH, WORDS = 7, 5, 11


class Vectors(nn.Module):
    """One of each op, of rows that are split by data and of parameters that are split by tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.form, self.short = nn.Bilinear(WIDTH, WIDTH, 6), nn.Bilinear(WIDTH, WIDTH, 3, bias=False)
        modes = ("sum", "mean", "max")
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS, 6, mode=mode) for mode in modes)
        self.padded = nn.ModuleList(nn.EmbeddingBag(WORDS, 6, mode=mode, padding_idx=3) for mode in modes)
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.points = nn.Parameter(torch.randn(9, WIDTH))
        self.register_buffer("offsets", torch.tensor([0, 3, 3, 4, 20]))

    def forward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        anchor = self.norm(x)
        flat = ids.flatten()
        found = {
            "form": self.form(anchor, y),
            "short": self.short(anchor, self.norm(y)),
            "triplet": F.triplet_margin_loss(anchor, y, y.flip(0), swap=True, reduction="none"),
            "triplet_mean": F.triplet_margin_loss(anchor, y, x, margin=2.0, p=1),
            "pairwise": F.pairwise_distance(anchor, y, p=3.0),
            "diagonal": torch.diagonal(anchor @ y.mT, 1),
            "diag": torch.diag(anchor[:, 0], -1),
            "trace": torch.trace(anchor.mT @ y),
            "median": torch.median(anchor),
            "logcumsumexp": torch.logcumsumexp(anchor * 3, 0),
            "per_sample": F.embedding_bag(ids, self.bags[0].weight, per_sample_weights=x.sigmoid(), mode="sum"),
        }
        for order in (1.0, 2.0, 2.5, math.inf):
            found[f"cdist_{order}"] = torch.cdist(anchor, self.points, p=order)
        for name, bag in zip(("sum", "mean", "max"), self.bags, strict=True):
            found[f"bag_{name}"] = bag(ids)
            found[f"runs_{name}"] = bag(flat, self.offsets)
        for name, bag in zip(("sum", "mean", "max"), self.padded, strict=True):
            found[f"padded_{name}"] = bag(ids)
            found[f"padded_runs_{name}"] = bag(flat, self.offsets)
        for name, (values, places) in {
            "median": torch.median(anchor, 1),
            "kthvalue": torch.kthvalue(anchor, 2, 0),
            "cummax": torch.cummax(anchor, 0),
            "cummin": torch.cummin(anchor, 1),
        }.items():
            found |= {f"{name}_values": values, f"{name}_places": places}
        return found


def example() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y, torch.randint(0, WORDS, (ROWS, WIDTH), generator=generator)


def vectors() -> Vectors:
    torch.manual_seed(0)
    return Vectors().double()


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "1/3/1/1"},
        {"strategy": "2/2/1/1"},
        {"strategy": "3/1/1/1"},
        {"mesh": 3, "shardings": {"x": "S[1]", "y": "S[1]", "ids": "S[1]", "points": "S[0]"}},
        {"mesh": 5, "shardings": {"*.weight": "S[0]", "points": "S[1]"}, "tail": "pad"},
        {"mesh": (2, 3), "shardings": {"x": "S[0], R", "ids": "S[0], S[1]", "form.weight": "S[1], S[0]"}},
    ],
    ids=str,
)
def test_they_are_split_in_any_way(options: dict[str, Any]) -> None:
    # Both modes: the norm keeps no statistics, so that it takes those of the batch in each.
    model, args = vectors().train("strategy" in options), example()
    expected = model(*args)
    compare(dr.compile(model, args, **options)(*args), expected)


@pytest.mark.sweep
def test_ranks_run_them_on_tvm() -> None:
    model, args = vectors().eval(), example()
    plan = dr.compile(model, args, mesh=2, shardings={"x": "S[0]", "ids": "S[0]", "*.weight": "S[0]"})
    compare(plan(*args, backend="tvm"), model(*args))


class Loss(nn.Module):
    """A number that all results have a part in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        found = [y for y in self.model(*args).values() if y.is_floating_point()]
        return sum((y.sin().mean() for y in found), torch.zeros((), dtype=torch.float64))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["1/3/1/1", "2/2/1/1", "3/1/1/1,zero=1"])
def test_steps_of_training_are_torch_s(strategy: str) -> None:
    model, args = Loss(vectors()), example()
    step = dr.compile_training(deepcopy(model), optimizer=dr.optim.SGD(0.1), example_batch=args, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(args), loss.item())
    found = step.parameters()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), msg=lambda m, name=name: f"{name}: {m}")
