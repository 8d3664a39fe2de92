"""Idle times and peaks of equal stages with free sends are those of the closed forms, exactly.

p ranks, m microbatches; F, I, W: the forward, the gradients of inputs, those of weights, of all of a rank's chunks.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from distir_relax.schedules import Timeline, Times, order_of, timeline

TIMES = [(1, 1, 1), (1, 2, 1), (Fraction(3, 7), Fraction(5, 3), Fraction(2, 11)), (7, 5, 4)]
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
    for rounds, (f, i, w) in product((1, 3), TIMES):
        found = of_equal_stages("interleaved", p, rounds * p, (f, i, w), v)
        assert found.idle == (Fraction(p - 1, v) * (f + i + w),) * p
        if rounds > 1:
            assert found.peak == tuple(Fraction(2 * (p - r - 1) + (v - 1) * p + 1, v) for r in range(p))


# Gradients of inputs longer and shorter than those of weights, forwards longer and shorter than either.
SPLIT_TIMES = [*TIMES, (1, 3, 2), (1, 1, 2), (5, 1, 3), (1, 5, 6), (Fraction(1, 2), 3, 3)]


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1(p: int) -> None:
    for m, (f, b, w) in product((p, 2 * p + 1), SPLIT_TIMES):
        found = of_equal_stages("zb-h1", p, m, (f, b, w))
        assert found.idle == ((p - 1) * max(f, b, f + b - w),) * p
        assert max(found.span_idle) == (p - 1) * max(b, f + b - w)
        assert found.peak == (p,) * p


@pytest.mark.parametrize("p", RANKS)
def test_zb_h2(p: int) -> None:
    for m, (f, b, w) in product((2 * p - 1, 3 * p), SPLIT_TIMES):
        found = of_equal_stages("zb-h2", p, m, (f, b, w))
        assert found.idle == ((p - 1) * max(f, b - f, f + b - 2 * w),) * p
        assert max(found.span_idle) == (p - 1) * max(0, b - f, f + b - 2 * w)
        assert found.peak == (2 * p - 1,) * p


@pytest.mark.parametrize("p", RANKS)
def test_zb_v(p: int) -> None:
    for m, (f, b, w) in product((2 * p - 1, 2 * p + 3), SPLIT_TIMES):
        found = of_equal_stages("zb-v", p, m, (f, b, w), 2)
        assert found.peak == (p,) * p
        if max(f, w) <= b:
            assert found.idle == ((p - 1) * max(Fraction(b) / 2, b - w),) * p
            assert max(found.span_idle) == (p - 1) * max(b - w, Fraction(b - f) / 2)
        else:
            assert max(found.idle) >= Fraction(p - 1, 2) * f, "the last rank begins no sooner"


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v(p: int) -> None:
    for m in (2 * p, 2 * p + 1, 3 * p + 1):
        found = of_equal_stages("dualpipe-v", p, m, (3, 3, 3), 2)
        assert found.idle == (Fraction(p - 1, 2) * 3,) * p
        assert set(found.peak) == {p + Fraction(1, 2)}


def test_where_the_published_forms_stop() -> None:
    """ZB-H1 with F < W: rank 0 may keep p microbatches, so it can but wait for the first gradient, (p - 1)B in all.

    ZB-V with F > B: the last rank cannot begin before (p - 1)F/2, which is more than (p - 1)B/2.
    """
    p, m, (f, b, w) = 4, 8, (1, 3, 2)
    h1 = of_equal_stages("zb-h1", p, m, (f, b, w))
    assert h1.span_idle[0] == h1.starts[0][p] - p * f == (p - 1) * b > (p - 1) * (f + b - w)
    assert set(h1.idle) == {9} != {(p - 1) * max(f, f + b - w)}
    f, b, w = 2, 1, 1
    v = of_equal_stages("zb-v", p, m, (f, b, w), 2)
    assert v.starts[-1][0] == Fraction(p - 1, 2) * f > Fraction(p - 1, 2) * b


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_no_split_backward_idles_less_than_the_last_rank_waits(name: str) -> None:
    for p, m, times in product((2, 3, 5), (1, 4, 11), SPLIT_TIMES):
        assert max(of_equal_stages(name, p, m, times).idle) >= (p - 1) * times[0]
