"""Ranks that differ, among ones that are disturbed together."""

from __future__ import annotations

import random

from distir_relax.calibration.unlike_ranks import unlike_ranks
from distir_relax.cost.heterogeneous import Group


def times(speeds: list[float], noise: float = 0.03, count: int = 49) -> list[list[float]]:
    """Times of ranks of these speeds: the machine is disturbed, each has noise, and now and then loses its core."""
    draw = random.Random(3)
    machine = [draw.choice((1.0, 1.0, 2.5)) for _ in range(count)]
    return [
        [m / s * (1 + draw.gauss(0, noise)) * draw.choice((*[1.0] * 9, 4.0)) for m in machine] for s in speeds
    ]  # fmt: skip


def test_like_ranks_have_no_groups() -> None:
    for ranks in (1, 2, 3, 7):
        assert unlike_ranks(times([1.0] * ranks)) == ()
    assert unlike_ranks(times([1.0, 0.97], noise=0.001)) == (), "3 % is little, however certain"
    assert unlike_ranks(times([1.0, 0.9], noise=0.4, count=5)) == (), "10 % are less than the noise"


def test_a_slow_rank_is_a_group_with_its_speed() -> None:
    (group,) = unlike_ranks(times([1.0, 0.5]))
    assert group.ranges == ((1, 1),)
    assert abs(group.speed - 0.5) < 0.01
    (group,) = unlike_ranks(times([0.8, 1.0, 1.0, 1.0, 1.0]))
    assert group.ranges == ((0, 0),)
    assert abs(group.speed - 0.8) < 0.02
    slow, fast = unlike_ranks(times([1.0, 0.7, 1.5, 1.0, 1.0]))
    assert (slow.ranges, fast.ranges) == (((1, 1),), ((2, 2),))
    assert slow.speed < 0.75 < 1.4 < fast.speed


def test_memory_may_differ_too() -> None:
    like = times([1.0, 1.0, 1.0])
    assert unlike_ranks(like, [8e9, 8.01e9, 8e9]) == ()
    # The reference may be the rank with other memory: then the others are the group.
    groups = unlike_ranks(like, [8e9, 4e9, 8e9])
    assert groups in ((Group(((1, 1),), 1.0, 4e9),), (Group(((0, 0), (2, 2)), 1.0, 8e9),))
