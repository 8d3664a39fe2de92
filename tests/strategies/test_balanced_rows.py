"""Rows of sequences in turns: each device has its share of the rows, and of the scores that masks allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.layout import Cut, Shard
from tests.strategies.test_unequal import unlike

Allowed = Callable[[Any, Any], Any]
CAUSAL: Allowed = lambda row, key: key <= row  # noqa: E731


class Model(nn.Module):
    """Attention with a mask, and little else."""

    def __init__(self, allowed: Allowed | None = CAUSAL) -> None:
        super().__init__()
        self.allowed = allowed
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.layer(x)[:, None]
        positions = torch.arange(x.shape[1])
        mask = None if self.allowed is None else self.allowed(positions[:, None], positions)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=mask is None)[:, 0]


def cut_of(model: nn.Module, length: int, strategy: str, **options: Any) -> Cut | None:
    """The cut of the sequence, None for consecutive rows, after a comparison with one process in float64."""
    x = torch.randn(2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = dr.compile(model.double(), (x,), strategy=strategy, **options)
    torch.testing.assert_close(plan(x), model(x), rtol=1e-12, atol=1e-12)
    placement = plan.modules["sharded"].main.inputs[0].value.dtensor.placements[-1]
    assert isinstance(placement, Shard)
    assert placement.dim == 1
    assert placement.cut is not None
    return None if placement.cut.is_block else placement.cut


def parts(cut: Cut, length: int, allowed: Allowed) -> list[tuple[float, float]]:
    """The part of the rows, and of the scores, of each device."""
    rows = torch.arange(length)
    keys = allowed(rows[:, None], rows).sum(1)
    own = [[row for start, stop in cut.intervals(rank) for row in range(start, stop)] for rank in range(cut.ranks)]
    assert sorted(row for held in own for row in held) == list(range(length))
    return [(len(held) / length, float(keys[held].sum() / keys.sum())) for held in own]


@pytest.mark.parametrize("function", [True, False], ids=["is_causal", "mask"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 127), (3, 128), (5, 127)])
def test_devices_take_turns_there_and_back(ranks: int, length: int, function: bool) -> None:
    cut = cut_of(Model(None if function else CAUSAL), length, f"1/1/1/1,context={ranks}")
    assert cut is not None
    for rows, scores in parts(cut, length, CAUSAL):
        assert rows == pytest.approx(1 / ranks, abs=2 / length)
        assert scores == pytest.approx(1 / ranks, rel=0.08)
    # The last of consecutive parts has almost twice its share.
    assert (
        parts(Cut.of(*[length // ranks] * (ranks - 1), length - length // ranks * (ranks - 1)), length, CAUSAL)[-1][1]
        > 1.4 / ranks
    )


@pytest.mark.parametrize(
    ("allowed", "is_balanced"),
    [
        (lambda row, key: (key <= row) & (key > row - 9), True),
        (lambda row, key: (key <= row) & (key > row - 90), False),
        (lambda row, key: key <= row + 40, False),
        (lambda row, key: key >= row, False),
        (lambda row, key: key * 0 + row >= 0, True),
    ],
    ids=["short window", "long window", "prefix", "reversed", "all"],
)
def test_other_masks(allowed: Allowed, is_balanced: bool) -> None:
    cut = cut_of(Model(allowed), 127, "1/1/1/1,context=3")
    assert (cut is None) == is_balanced
    for rows, scores in parts(cut, 127, allowed) if cut else ():
        assert rows == pytest.approx(1 / 3, abs=0.02)
        assert scores == pytest.approx(1 / 3, rel=0.08)


def test_devices_of_unequal_speed_have_their_shares_of_rows_and_scores() -> None:
    cut = cut_of(Model(), 127, "1/1/1/1,context=3", profile=unlike(1.0, 0.5, 0.25))
    assert cut is not None
    for (rows, scores), share in zip(parts(cut, 127, CAUSAL), (4 / 7, 2 / 7, 1 / 7), strict=True):
        assert rows == pytest.approx(share, abs=0.02)
        assert scores == pytest.approx(share, rel=0.12)


def test_rows_stay_together_where_attention_is_little_work() -> None:
    """Products with weights have the same work in all rows: half of a percent here is attention."""

    class Deep(Model):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Sequential(nn.Linear(4, 800), nn.ReLU(), nn.Linear(800, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.before(x))

    assert cut_of(Deep(), 13, "1/1/1/1,context=2") is None


def test_a_mask_that_comes_in_is_cut_by_consecutive_rows() -> None:
    class Masked(Model):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            q = self.layer(x)[:, None]
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]

    model = Masked().double()
    x, mask = torch.randn(2, 12, 4, dtype=torch.float64), torch.ones(12, 12, dtype=torch.bool).tril()
    plan = dr.compile(model, (x, mask), strategy="1/1/1/1,context=3")
    torch.testing.assert_close(plan(x, mask), model(x, mask), rtol=1e-12, atol=1e-12)
    assert "S[1: 4|4|4]" in plan.text("sharded")
