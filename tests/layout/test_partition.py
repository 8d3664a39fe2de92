"""Cuts of one dim along several axes: they leave every element on one device, and divide evenly what they divide."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distir_relax.errors import PlacementError
from distir_relax.layout import Cut, Segment, Shard, block_bounds, local_intervals, parse_placement
from distir_relax.layout.partition import (
    balanced,
    chunked,
    cut_in_elements,
    cut_in_units,
    is_nested,
    partition_rule,
    proportional,
    refine_cut,
)

SETTINGS = settings(derandomize=True, deadline=None, database=None, max_examples=100)


@SETTINGS
@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.sampled_from((balanced, chunked)))
def test_refined_cuts_are_blocks_in_order(size: int, mesh: list[int], divide: object) -> None:
    cuts: list[Cut] = []
    for ranks in mesh:
        cuts.append(refine_cut(size, cuts, ranks, divide))  # type: ignore[arg-type]
    placements = [Shard(0, cut) for cut in cuts]
    assert all(is_nested(a, b) for a, b in itertools.combinations(cuts, 2))
    bounds = block_bounds(placements, 0, size, mesh)
    assert bounds is not None
    assert len(bounds) == math.prod(mesh) + 1
    for number, place in enumerate(itertools.product(*map(range, mesh))):
        held = [i for a, b in local_intervals(placements, 0, size, place) for i in range(a, b)]
        assert held == list(range(bounds[number], bounds[number + 1]))
    if divide is balanced:
        for place in itertools.product(*map(range, mesh[:-1])):
            counts = [_held(placements, size, (*place, i)) for i in range(mesh[-1])]
            assert max(counts) - min(counts) <= 1


@SETTINGS
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1))
def test_the_cut_of_a_dim_gives_back_that_of_its_units(outer: int, inner: int, rows: list[list[int]]) -> None:
    units = Cut(tuple(Segment(1, tuple(row)) for row in rows))
    whole = cut_in_elements(units, outer, inner)
    assert whole.total == outer * inner * units.total
    found = cut_in_units(whole, outer, units.total, inner, "")
    for index in range(3):
        assert found.intervals(index) == units.intervals(index)


@pytest.mark.parametrize(
    ("first", "second", "fit"),
    [
        (Cut.of(4, 3), Cut((Segment(1, (2, 2)), Segment(1, (2, 1)))), True),
        (Cut((Segment(1, (2, 2)), Segment(1, (2, 1)))), Cut.of(4, 3), True),
        (Cut.of(4, 3), Cut.of(4, 3), False),
        (Cut.of(7, 0), Cut.of(4, 3), True),
        (Cut.of(3, 2, 2), Cut.of(4, 3), False),
    ],
)
def test_nested(first: Cut, second: Cut, fit: bool) -> None:
    assert is_nested(first, second) == fit


def test_blocks_out_of_order_are_none() -> None:
    swapped = Shard(0, Cut((Segment(1, (0, 2)), Segment(1, (2, 0)))))
    assert block_bounds([swapped], 0, 4, [2]) is None
    assert block_bounds([Shard(0, Cut((Segment(2, (1, 1)),)))], 0, 4, [2]) is None


def test_sizes_that_tear_a_unit() -> None:
    with pytest.raises(PlacementError, match="units of 4 elements"):
        cut_in_units(Cut((Segment(1, (4, 2)), Segment(1, (2, 4)))), 1, 3, 4, "")


def _held(placements: list[Shard], size: int, place: tuple[int, ...]) -> int:
    return sum(b - a for a, b in local_intervals(placements, 0, size, place))


@SETTINGS
@given(
    st.integers(0, 13),
    st.lists(st.sampled_from((1.0, 0.5, 1 / 3, 0.7, 0.05)), min_size=1, max_size=4),
    st.lists(st.integers(0, 14), min_size=4, max_size=4),
    st.booleans(),
)
def test_no_other_sizes_are_done_sooner(size: int, shares: list[float], most: list[int], limited: bool) -> None:
    """Of all whole sizes, each one at least where that is possible, and within limits where those suffice."""
    limits = most[: len(shares)] if limited else []
    found = proportional(size, shares, limits)
    least = int(size >= len(shares))
    bounds = limits if limits and sum(limits) >= size and min(limits) >= least else [size] * len(shares)
    ways = [
        sizes
        for sizes in itertools.product(range(size + 1), repeat=len(shares))
        if sum(sizes) == size and all(least <= n <= bound for n, bound in zip(sizes, bounds, strict=True))
    ]
    assert found in ways
    last = [max(n / share for n, share in zip(sizes, shares, strict=True)) for sizes in (found, *ways)]
    assert last[0] <= min(last) + 1e-9


@SETTINGS
@given(st.integers(0, 300), st.integers(1, 5), st.integers(1, 70), st.sampled_from(("", "2:1:0.5:3:1")))
def test_shards_begin_at_multiples(size: int, ranks: int, multiple: int, shares: str) -> None:
    """The whole multiples are divided as units are; the end of the dim is on the last device that has elements."""
    how = ":".join(shares.split(":")[:ranks]) if ranks > 1 else ""
    placement = parse_placement(f"S[0: {how}/{multiple}]")
    assert isinstance(placement, Shard)
    assert parse_placement(str(placement)) == placement
    sizes = partition_rule(placement)(size, ranks)
    assert (sum(sizes), len(sizes)) == (size, ranks)
    assert all(n % multiple == 0 for n in sizes[: max((i for i, n in enumerate(sizes) if n), default=0)])
    units = -(-size // multiple)
    expected = proportional(units, placement.shares) if placement.shares else balanced(units, ranks)
    assert tuple(-(-n // multiple) for n in sizes) == expected


def test_multiples_of_units() -> None:
    """50257 by 64; units of 48 elements stay whole, and every fourth begins at a multiple of 64."""
    by_64 = Shard(0, multiple=64)
    assert partition_rule(by_64)(50257, 2) == (25152, 25105)
    assert partition_rule(by_64)(50257, 5) == (10112, 10048, 10048, 10048, 10001)
    assert partition_rule(by_64, inner=48)(13, 3) == (8, 4, 1)


@pytest.mark.parametrize(
    "text", ["S[0: /0]", "S[0: /x]", "S[0: 2:1/]", "S[0: /64/2]", "S[0: /-64]", "S[0: /1234567890]"]
)
def test_multiples_that_are_none(text: str) -> None:
    with pytest.raises(PlacementError, match="is not a placement"):
        parse_placement(text)


@pytest.mark.parametrize("ranks", [1, 3, 5, 7])
def test_equal_shares_divide_evenly(ranks: int) -> None:
    for size in (0, 1, 3, 7, 127, 128_256):
        assert proportional(size, (0.3,) * ranks) == balanced(size, ranks)
    assert proportional(12, (2.0, 1.0)) == (8, 4)
    assert proportional(127, (1.0, 1.0, 1.0), (127, 7, 127)) == (60, 7, 60)
