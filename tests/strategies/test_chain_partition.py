"""Sequences cut into stretches, against all ways to cut them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from distir_relax.strategies.chain_partition import SLACK, balanced_cuts


def dearest(costs: list[float], crossing: list[float], cuts: tuple[int, ...]) -> float:
    ends = [0, *cuts, len(costs)]
    return max(max(sum(costs[a:b]), crossing[a]) for a, b in pairwise(ends))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_has_a_much_cheaper_dearest_stretch(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(2, 9)
    count = draw.randint(1, n)
    costs = [draw.choice([0.0, 1.0, draw.random(), 5.0]) for _ in range(n)]
    crossing = [0.0, *(draw.random() for _ in range(n - 1))]
    found = tuple(balanced_cuts(costs, crossing, count))
    assert len(found) == count - 1
    assert list(found) == sorted(set(found))
    assert all(0 < cut < n for cut in found)
    best = min(dearest(costs, crossing, cuts) for cuts in combinations(range(1, n), count - 1))
    assert dearest(costs, crossing, found) <= best * (1 + SLACK) + 1e-12


def test_equal_layers_are_cut_into_equal_stages_with_the_shorter_in_front() -> None:
    assert balanced_cuts([1.0] * 7, [0.0] * 7, 3) == [2, 4]
    # What is sent is sent beside the work.
    assert balanced_cuts([1.0] * 7, [0.0, *[0.1] * 6], 3) == [2, 4]
    # A layer is an op that costs much and one that costs next to nothing.
    assert balanced_cuts([1.0, 0.001] * 6, [0.0, *[0.01] * 11], 3) == [4, 8]


def test_little_is_sent_where_costs_are_the_same() -> None:
    assert balanced_cuts([1.0, 0.0, 0.0, 1.0], [0.0, 0.01, 0.001, 0.01], 2) == [2]


def test_what_takes_longer_to_send_than_to_make_is_not_sent() -> None:
    assert balanced_cuts([1.0] * 4, [0.0, 0.1, 5.0, 0.1], 2) == [1]
