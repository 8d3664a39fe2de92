"""How long communications take, against the formulas of the algorithms, exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from distir_relax.cost.network import collective_seconds, level_of
from distir_relax.cost.profile import Level, Line
from distir_relax.errors import ProfileError
from tests.machines import link, machine

# Powers of two, so that the formulas are exact in floating point whatever the order of their terms.
A, B = 2.0**-20, 2.0**-30
ALL = tuple(range(16))


def ring(n: int, size: int) -> float:
    return 2 * (n - 1) * (A + size / n * B)


@pytest.mark.parametrize("n", [3, 5, 7, 8, 16])
def test_a_large_all_reduce_goes_round_a_ring(n: int) -> None:
    profile = machine(16, link(A, 1 / B))
    size = n << 24
    assert collective_seconds(profile, "all_reduce", ALL[:n], [size] * n) == ring(n, size)


@pytest.mark.parametrize("n", [2, 3, 5, 7, 8, 16])
def test_a_small_all_reduce_doubles(n: int) -> None:
    profile = machine(16, link(A, 1 / B))
    expected = math.ceil(math.log2(n)) * (A + 8 * B)
    assert expected < ring(n, 8)
    assert collective_seconds(profile, "all_reduce", ALL[:n], [8] * n) == expected


def test_the_all_reduce_changes_where_two_take_equally_long() -> None:
    # For 8 devices: 3 (A + size B) = 2 (3 A + size B), so size B = 3 A;
    # 2 (3 A + size B) = 14 (A + size B / 8), so 32 A.
    profile = machine(16, link(A, 1 / B))
    for times, below, above in ((3, "doubling", "tree"), (32, "tree", "ring")):
        for size, kind in ((0.99 * times * A / B, below), (1.01 * times * A / B, above)):
            expected = {
                "doubling": 3 * (A + size * B), "tree": 2 * (3 * A + size * B), "ring": ring(8, size),
            }  # fmt: skip
            assert min(expected.values()) == expected[kind]
            assert collective_seconds(profile, "all_reduce", ALL[:8], [size] * 8) == pytest.approx(
                expected[kind], rel=1e-14
            )


@pytest.mark.parametrize(("units", "each"), [(3, 5), (5, 3), (4, 3)])
def test_a_hierarchical_all_reduce(units: int, each: int) -> None:
    inner, outer = Level("inside", each, A, 64 / B), Level("between", 1 << 20, 8 * A, 1 / B)
    profile = machine(16, (inner, outer))
    n, size = units * each, units * each << 20
    piece = size / each
    expected = 2 * (each - 1) * (A + piece * B / 64) + 2 * (units - 1) * (8 * A + piece / units * B)
    flat = 2 * (n - 1) * (8 * A + size / n * B)
    assert expected < flat
    assert collective_seconds(profile, "all_reduce", ALL[:n], [size] * n) == pytest.approx(expected, rel=1e-14)


def test_units_of_which_unlike_numbers_take_part_reduce_in_one_ring() -> None:
    inner, outer = Level("inside", 4, A, 64 / B), Level("between", 1 << 20, 8 * A, 1 / B)
    size = 7 << 20
    found = collective_seconds(machine(16, (inner, outer)), "all_reduce", ALL[:7], [size] * 7)
    assert found == 2 * 6 * (8 * A + size / 7 * B)


@pytest.mark.parametrize("held", [[96, 96, 96], [7, 0, 129], [0, 0, 5, 1, 0]], ids=str)
def test_an_uneven_all_gather_passes_the_largest_shard_each_time(held: list[int]) -> None:
    profile = machine(16, link(A, 1 / B))
    assert collective_seconds(profile, "all_gather", ALL[: len(held)], held) == (len(held) - 1) * (A + max(held) * B)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_pieces_go_to_each_other_device(collective: str, n: int) -> None:
    size = n << 20
    assert collective_seconds(machine(16, link(A, 1 / B)), collective, ALL[:n], [size] * n) == (n - 1) * (
        A + size / n * B
    )


def test_a_send_takes_its_latency_and_its_bytes() -> None:
    assert collective_seconds(machine(16, link(A, 1 / B)), "send", (3, 9), (1000,)) == A + 1000 * B


def test_devices_talk_over_the_innermost_level_that_joins_them() -> None:
    levels = (Level("socket", 2, A, 4 / B), Level("node", 6, 2 * A, 2 / B), Level("net", 18, 4 * A, 1 / B))
    profile = machine(40, levels)
    found = [level_of(profile, pair).name for pair in ((0, 1), (1, 2), (4, 5), (5, 6), (0, 17), (2, 30))]
    assert found == ["socket", "node", "socket", "net", "net", "net"]
    for pair, level in (((0, 1), 0), ((1, 2), 1), ((5, 6), 2)):
        assert (
            collective_seconds(profile, "send", pair, (512,)) == levels[level].latency + 512 / levels[level].bandwidth
        )


def test_each_collective_has_its_fixed_overhead_and_one_device_none() -> None:
    profile = replace(machine(16, link(A, 1 / B)), collective_overhead=2.0**-10)
    assert collective_seconds(profile, "send", (0, 1), (8,)) == 2.0**-10 + A + 8 * B
    assert collective_seconds(profile, "all_reduce", (3,), (8,)) == 0.0


def test_measured_lines_stand_before_formulas_and_are_interpolated() -> None:
    lines = (Line("all_reduce", 2, 2.0, 0.25), Line("all_reduce", 8, 5.0, 0.5))
    profile = replace(machine(16, link(A, 1 / B)), lines=lines)
    assert collective_seconds(profile, "all_reduce", ALL[:2], [4] * 2) == 3.0
    assert collective_seconds(profile, "all_reduce", ALL[:8], [4] * 8) == 7.0
    assert collective_seconds(profile, "all_reduce", ALL[:5], [4] * 5) == 5.0
    assert collective_seconds(profile, "all_reduce", ALL, [4] * 16) == 7.0
    assert collective_seconds(profile, "send", (0, 1), (4,)) == A + 4 * B


def test_lines_of_a_level_are_for_groups_that_it_joins() -> None:
    levels = (Level("host", 2, A, 4 / B), Level("network", 16, 4 * A, 1 / B))
    lines = (
        Line("all_reduce", 2, 2.0, 0.25, level="host"),
        Line("all_reduce", 2, 4.0, 0.25, level="network"),
        Line("all_reduce", 4, 6.0, 0.25, level="network"),
        Line("all_gather", 2, 7.0, 0.25),
        Line("send", 2, 8.0, 0.25, level="network"),
    )
    profile = replace(machine(16, levels), lines=lines)
    found = [collective_seconds(profile, "all_reduce", group, [4] * 2) for group in ((2, 3), (0, 2), (1, 2))]
    assert found == [3.0, 5.0, 5.0]
    assert collective_seconds(profile, "all_reduce", (0, 2, 4), [4] * 3) == 6.0, "between two and four"
    assert collective_seconds(profile, "all_gather", (0, 1), [2] * 2) == 8.0, "a line without a level is for all"
    assert collective_seconds(profile, "send", (1, 2), (4,)) == 9.0
    assert collective_seconds(profile, "send", (0, 1), (4,)) == A + 4 * B / 4, "a level without a line has its formula"


def test_programs_that_are_bound_have_lines_of_their_own() -> None:
    lines = (
        Line("all_reduce", 2, 2.0, 0.25),
        Line("all_reduce", 2, 1.0, 0.125, recorded=True),
        Line("all_reduce", 3, 3.0, 0.25, recorded=True),
        Line("all_gather", 2, 5.0, 0.5),
    )
    profile = replace(machine(16, link(A, 1 / B)), lines=lines)
    assert collective_seconds(profile, "all_reduce", ALL[:2], [4] * 2) == 3.0
    assert collective_seconds(profile, "all_reduce", ALL[:3], [4] * 3) == 3.0, "that of fewer ranks"
    recorded = replace(profile, is_recorded=True)
    assert collective_seconds(recorded, "all_reduce", ALL[:2], [4] * 2) == 1.5
    assert collective_seconds(recorded, "all_reduce", ALL[:3], [4] * 3) == 4.0
    assert collective_seconds(recorded, "all_gather", ALL[:2], [4] * 2) == 9.0, "Python calls it in any program"


def test_errors_name_what_is_missing() -> None:
    with pytest.raises(ProfileError, match="the program uses device 16, the profile by hand has 16") as raised:
        collective_seconds(machine(16), "send", (0, 16), (8,))
    assert "more devices" in str(raised.value)
    with pytest.raises(ProfileError, match="no model of the communication 'gossip'"):
        collective_seconds(machine(16), "gossip", (0, 1), (8, 8))


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_worse_links_never_make_it_faster(collective: str) -> None:
    for n in (2, 3, 5, 12):
        count = 2 if collective == "send" else n
        for size in (0, 1, 1000, 10**7):
            times = []
            for factor in (1, 2, 3, 10):
                levels = (
                    Level("inside", 4, A * factor, 16 / B / factor),
                    Level("out", 99, 4 * A * factor, 1 / B / factor),
                )
                times.append(collective_seconds(machine(16, levels), collective, ALL[:count], [size] * count))
            assert times == sorted(times)
            assert times[0] < times[-1]
