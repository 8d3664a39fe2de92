"""Communications that overlap on an uplink, to the femtosecond: groups of one op, streams, and devices of a unit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distir_relax.cost.profile import Level
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import parse, verify
from distir_relax.ops import check
from distir_relax.simulation.critical_path import critical_path
from distir_relax.simulation.shared_links import InFlight, LinkUse, absolute, delay, relative, with_transfer
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine

SECOND = 10**15
# Units of 3 devices share 100 bytes a second; a tensor of 5 x 5 float64 has 200 bytes.
LEVELS = (Level("unit", 3, 0.0, 1e30, uplink=100.0), Level("net", 1 << 20, 0.5, 1e30))
OWN = (replace(LEVELS[0], uplink=0.0), replace(LEVELS[1], bandwidth=100.0))


def simulate(text: str, levels: tuple[Level, ...] = LEVELS, flops: float = 250.0, **changes: float) -> Simulation:
    """A machine on which a product of 5 x 5 takes a second."""
    module = infer_types(parse(text))
    verify(module, check)
    return simulate_module(module, replace(machine(16, levels, flops=flops), **changes))  # type: ignore[arg-type]


def seconds(found: Simulation) -> float:
    return max(found.clocks) / SECOND


STREAMS = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[5,5] @ {0,1}, input %w: f64[5,5] @ {0,1}) {
    %a = all_reduce(%x) {axis="d", op="sum", stream="one"}
    FIRST
    %b = all_reduce(%w) {axis="d", op="sum", stream="two"}
    %p = wait(%a)
    %q = wait(%b)
    return "p": %p, "q": %q
  }
}
"""
PAIRS = (replace(LEVELS[0], size=1), LEVELS[1])
"""Each device is a unit of its own, so a group of two crosses."""


def streams(first: str, levels: tuple[Level, ...] = PAIRS, **changes: float) -> Simulation:
    return simulate(STREAMS.replace("FIRST", first), levels, **changes)


def test_two_equal_collectives_at_once_take_the_bandwidth_of_both() -> None:
    assert seconds(streams("")) == 0.5 + 2 * 2.0
    assert seconds(streams("", (OWN[0], replace(OWN[1], size=1)))) < 0.5 + 2 * 2.0


def test_a_collective_that_starts_during_another_shares_what_is_left() -> None:
    # One second of the two is left when the second starts; both need 2 + 2 seconds of the link in all.
    assert seconds(streams("%m = matmul(%x, %w)")) == 1 + 0.5 + 2 + 1
    # After it, the second one runs alone.
    late = "%m = matmul(%x, %w)\n    %n = matmul(%m, %w)\n    %o = matmul(%n, %w)"
    assert seconds(streams(late)) == 3 + 0.5 + 2


def test_a_short_collective_takes_twice_its_own_time_at_most() -> None:
    text = STREAMS.replace("FIRST", "").replace("%w: f64[5,5]", "%w: f64[5,1]")
    found = simulate(text, PAIRS)
    ends = {event.op.results[0].name: start + event.duration for event, start in found.events() if event.stream}
    assert ends["b"] == round((0.5 + 2 * 0.4) * SECOND)
    assert ends["a"] == round(2.5 * SECOND)
    # In the other order, the long one ends when all bytes have passed.
    swapped = text.replace("%a = all_reduce(%x)", "%a = all_reduce(%w)").replace(
        "%b = all_reduce(%w)", "%b = all_reduce(%x)"
    )
    assert seconds(simulate(swapped, PAIRS)) == 0.5 + 2.4


def test_a_delayed_collective_also_holds_its_devices_longer() -> None:
    found = streams("", beside=0.75)
    # The second starts when the first has taken a quarter of its time, and 1.375 of its 2 seconds of the link are left.
    first, second = 2.5, 0.5 + 2 + (2 - 0.25 * 2.5)
    assert found.busy[1] == [round(0.25 * (first + second) * SECOND)] * len(found.members)
    assert sum(step.duration for step in critical_path(found).steps) == max(found.clocks)


SENDS = """
module @distributed {
  mesh[0] = device_mesh((6,), ("d",))
  func @main(input %x: f64[5,5] @ {0}, input %y: f64[5,5] @ {1}, input %z: f64[5,5] @ {FROM}) {
    %a @ {3} = send(%x)
    %b @ {4} = send(%y)
    %c @ {TO} = send(%z)
    return "a": %a, "b": %b, "c": %c
  }
}
"""


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [(2, 5, 3), (5, 2, 2), (2, 7, 3), (6, 5, 3), (6, 9, 2)],
    ids=["same way", "opposite", "out of the unit", "into the unit", "elsewhere"],
)
def test_sends_of_devices_of_a_unit_share_its_uplink(source: int, target: int, expected: int) -> None:
    text = SENDS.replace("FROM", str(source)).replace("TO", str(target)).replace("(6,)", "(12,)")
    assert seconds(simulate(text)) == 0.5 + 2 * expected
    assert seconds(simulate(text, OWN)) == 0.5 + 2


GROUPS = """
module @distributed {
  mesh[0] = device_mesh((2, 3), ("a", "b"))
  func @main(input %x: f64[5,5] @ {0..5}) {
    %y = all_reduce(%x) {axis="AXIS", op="sum"}
    %z = all_reduce(%y) {axis="AXIS", op="max"}
    return "z": %z
  }
}
"""


def test_groups_of_one_op_share_an_uplink() -> None:
    found = simulate(GROUPS.replace("AXIS", "a"))
    assert len(found.members) == 1
    # Doubling, thrice the bytes, and one op after the other.
    assert seconds(found) == 2 * (0.5 + 3 * 2)
    assert seconds(simulate(GROUPS.replace("AXIS", "b"))) < 1e-6


def test_devices_of_unlike_units_are_different_classes() -> None:
    # Rows of 3 over units of 2: the unit in the middle has devices of both.
    levels = (replace(LEVELS[0], size=2), LEVELS[1])
    found = simulate(GROUPS.replace("AXIS", "b"), levels)
    assert found.class_of.tolist()[0] != found.class_of.tolist()[2]
    # Four steps of a ring, of two messages over an uplink each.
    assert seconds(found) == pytest.approx(2 * 4 * (0.5 + 2 * 2 / 3))
    assert len(simulate(GROUPS.replace("AXIS", "b"), (replace(OWN[0], size=2), OWN[1])).members) == 2


def test_a_slow_device_leaves_room_on_its_uplink() -> None:
    """With links of 20 bytes a second, five sends fill an uplink of 100; two take no longer than one."""
    levels = (LEVELS[0], replace(LEVELS[1], bandwidth=20.0))
    text = SENDS.replace("FROM", "2").replace("TO", "5")
    assert seconds(simulate(text, levels)) == 0.5 + 10


def ends(arrivals: list[tuple[int, int]]) -> list[int]:
    """When transfers end that start at a time and need a service, as `shared_links` predicts them in turn."""
    state: InFlight | None = None
    result = []
    for start, service in arrivals:
        use = [LinkUse(0, service, service)]
        result.append(start + service + delay(use, {} if state is None else {0: state}, start))
        state = with_transfer(state, start, service)
    return result


@pytest.mark.parametrize("seed", range(30))
def test_the_last_transfer_ends_as_with_equal_shares(seed: int) -> None:
    """Against a link that serves all transfers in small time slices."""
    draw = random.Random(seed)
    arrivals, now = [], 0
    for _ in range(draw.choice([2, 3, 5, 7])):
        now += draw.choice([0, 0, 1, 5, 13]) * 60
        arrivals.append((now, draw.choice([1, 2, 7, 20]) * 60))
    for count in range(1, len(arrivals) + 1):
        left = {number: float(service) for number, (_, service) in enumerate(arrivals[:count])}
        time, step = 0.0, 0.25
        finished: dict[int, float] = {}
        while left:
            present = [number for number in left if arrivals[number][0] <= time]
            for number in present:
                left[number] -= step / len(present)
                if left[number] <= 1e-9:
                    finished[number] = time + step
                    del left[number]
            time += step
        assert ends(arrivals[:count])[-1] == pytest.approx(finished[count - 1], abs=4)


def test_the_state_of_a_link_is_relative_and_idle_when_all_has_passed() -> None:
    state = with_transfer(with_transfer(None, 100, 30), 110, 7)
    assert state == (110, (7, 20))
    assert relative(state, 105) == (5, 7, 20)
    assert absolute(relative(state, 120), 1120) == (1110, (7, 20))
    assert relative(state, 136) == (-26, 7, 20)
    assert relative(state, 137) == relative(None, 0) == ()
    # One that starts before the last did counts from there.
    assert with_transfer(state, 90, 5) == (110, (5, 7, 20))
