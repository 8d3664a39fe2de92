"""Idle times and peaks of equal stages with free sends are those of the closed forms, exactly.

p ranks, m microbatches; F, I, W: the forward, the gradients of inputs, those of weights, of all of a rank's chunks.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from distir_relax.schedules import Timeline, Times, order_of, timeline

TIMES = [(1, 1, 1), (1, 2, 1), (3, 1, 1), (2, 3, 1), (Fraction(3, 7), Fraction(5, 3), Fraction(2, 11)), (7, 5, 4)]
RANKS = range(2, 9)


def of_equal_stages(name: str, p: int, m: int, whole: tuple[int | Fraction, ...], chunks: int = 1) -> Timeline:
    """The time line if each of a rank's chunks takes an equal part of the times."""
    return timeline(order_of(name, p, m, chunks), Times(*(Fraction(time) / chunks for time in whole)))


@pytest.mark.parametrize(("name", "p"), product(("gpipe", "1f1b"), RANKS))
def test_gpipe_and_1f1b(name: str, p: int) -> None:
    for m, (f, i, w) in product((1, p - 1, p, p + 1, 2 * p, 3 * p + 1), TIMES):
        found = of_equal_stages(name, p, m, (f, i, w))
        assert found.idle == ((p - 1) * (f + i + w),) * p
        assert found.peak == tuple(m if name == "gpipe" else min(m, p - r) for r in range(p))


@pytest.mark.parametrize(("p", "v"), product(RANKS, (2, 3, 4)))
def test_interleaved(p: int, v: int) -> None:
    for rounds, (f, i, w) in product((1, 2, 3), TIMES):
        found = of_equal_stages("interleaved", p, rounds * p, (f, i, w), v)
        assert found.idle == (Fraction(p - 1, v) * (f + i + w),) * p
        if rounds > 1:
            assert found.peak == tuple(Fraction(2 * (p - r - 1) + (v - 1) * p + 1, v) for r in range(p))
