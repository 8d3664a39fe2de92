"""Deterministic training: the same bits on every number of data-parallel ranks, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.errors import DistIRError
from tests.families import FAMILIES

RANKS, PIECES, ROWS, STEPS = (1, 2, 3, 6), 6, 18, 5


class Coupled(nn.Module):
    """Norms over all samples and over each, dropout, a weight that is used twice, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch, self.norm = nn.Linear(5, 127), nn.BatchNorm1d(127), nn.LayerNorm(127)
        self.twice, self.drop, self.last = nn.Linear(127, 127), nn.Dropout(0.2), nn.Linear(127, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.twice(self.batch(self.first(x)))))
        return self.last(self.drop(torch.tanh(self.twice(x))))


def batches() -> list[Any]:
    """Targets of which a different number counts in each part of a batch."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        targets = torch.randint(0, 3, (ROWS,), generator=generator)
        targets[[0, 1, 4, 11]] = -100
        found.append((torch.randn(ROWS, 5, generator=generator), targets))
    return found


def compiled(ranks: int, pieces: int | None = PIECES, **options: Any) -> dr.TrainingStep:
    torch.manual_seed(0)
    return dr.compile_training(
        Coupled().train(), F.cross_entropy, optimizer=dr.optim.AdamW(0.01), example_batch=batches()[0], clip_norm=0.5,
        strategy=f"{ranks}/1/1/1", deterministic=pieces, **options,
    )  # fmt: skip


def run(step: dr.TrainingStep) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and all state."""
    return [step(*batch) for batch in batches()], step.plan.session().state()


def has_same_bits(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["float32", "bf16"])
def test_every_number_of_ranks_gives_the_same_bits(options: dict[str, Any]) -> None:
    first, *others = (run(compiled(ranks, **options)) for ranks in (RANKS if not options else (1, 3)))
    assert all(has_same_bits(first, other) for other in others)
    # Without it they differ in the last bits alone.
    usual, other = (run(compiled(ranks, None, **options)) for ranks in (1, 3))
    assert not has_same_bits(usual, other)
    torch.testing.assert_close(first[0], usual[0], rtol=2e-2 if options else 1e-5, atol=1e-5)


@pytest.mark.sweep
def test_a_transformer_has_the_same_bits() -> None:
    found = []
    for ranks in RANKS:
        torch.manual_seed(0)
        family = FAMILIES["gpt2"]()
        args: Any = family.args
        args = {key: _repeated(x) for key, x in args.items()} if isinstance(args, dict) else tuple(map(_repeated, args))
        step = dr.compile_training(
            family.model.train(), optimizer=dr.optim.SGD(0.1, momentum=0.9), example_batch=args, deterministic=PIECES,
            strategy=f"{ranks}/1/1/1",
        )  # fmt: skip
        found.append(([step(args) for _ in range(2)], step.plan.session().state()))
    assert all(has_same_bits(found[0], other) for other in found[1:])


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x] * 12)[:12]


@pytest.mark.sweep
def test_a_run_goes_on_with_the_same_bits_on_other_ranks(tmp_path: Path) -> None:
    whole, first, second = (compiled(ranks) for ranks in (2, 6, 3))
    dr.train(whole, batches(), steps=5)
    dr.train(first, batches(), steps=2, checkpoint=tmp_path)
    dr.train(second, batches(), steps=5, checkpoint=tmp_path, resume="last")
    one, other = (step.plan.session().state() for step in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_simulated_but_not_searched() -> None:
    training = dr.Training(nn.Linear(5, 3), F.cross_entropy, dr.optim.SGD(), batches()[0], deterministic=PIECES)
    one, three = (dr.simulate(training, profile="dgx-a100", strategy=f"{n}/1/1/1") for n in (1, 3))
    assert three.makespan != one.makespan
    with pytest.raises(DistIRError, match="there is nothing to search"):
        dr.search(training, devices=2, profile="dgx-a100")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": 0}, "expected a number of pieces of at least 1"),
        ({"strategy": "4/1/1/1"}, "4 data-parallel ranks do not divide 6 pieces"),
        ({"strategy": "3/1/1/1,zero=1"}, "expected a strategy of data parallelism alone, found 3/1/1/1,zero=1"),
        ({"strategy": "1/2/1/1"}, "expected a strategy of data parallelism alone, found 1/2/1/1"),
        ({"strategy": "2/1/1/2"}, "expected a strategy of data parallelism alone, found 2/1/1/2"),
        ({"mesh": 2, "shardings": {"x": "S[0]"}}, "expected a strategy of data parallelism alone, found mesh"),
        ({"deterministic": 4}, "expected a batch of a multiple of 4 samples, found 18"),
    ],
    ids=str,
)
def test_what_cannot_be_deterministic(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"optimizer": dr.optim.SGD(), "example_batch": batches()[0], "deterministic": PIECES}
    with pytest.raises(DistIRError, match=message):
        dr.compile_training(nn.Linear(5, 3), F.cross_entropy, **{**arguments, **options})
