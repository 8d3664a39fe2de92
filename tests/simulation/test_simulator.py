"""What holds for every simulation: nothing is lost, nothing overlaps, worse machines are no faster, and calls and
classes of devices are only a quicker way to the same result. On random programs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from distir_relax.cost.profile import Level, Profile
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import CALL, Module, inline, parse, verify
from distir_relax.ops import check
from distir_relax.simulation import simulator
from distir_relax.simulation.device_classes import DeviceClasses
from distir_relax.simulation.op_timer import COMMUNICATION, COMPUTE
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine as made
from tests.simulation.schedules import schedule, with_calls_and_without

SEEDS = range(30)
LEVELS = (Level("pair", 2, 1e-6, 4e9), Level("box", 100, 3e-6, 1e9))
MACHINE = replace(made(8, LEVELS, flops=1e8, bandwidth=1e10, overhead=2e-7), cache=500.0, cache_bandwidth=3e10)
HELD = replace(MACHINE, beside=0.25)
"""The same where what is sent keeps its devices from working for three quarters of its time."""
ISSUED = replace(MACHINE, dispatch=1.3e-6, view=4e-7)
"""The same where a host issues the ops of each device, which now one and now the other waits for."""
BLOCKED = replace(HELD, dispatch=7e-7, waits=frozenset({"send", "all_reduce"}))
"""The same where hosts wait for what they send and sum."""
SHARED = replace(HELD, levels=(Level("row", 3, 1e-6, 4e9, uplink=7e8), LEVELS[1]))
"""The same where devices of a row share the link out of it, so that communications slow each other."""
SHARED_AND_ISSUED = replace(SHARED, dispatch=1.3e-6, view=4e-7)
TREE = replace(ISSUED, levels=(replace(LEVELS[0], uplink=4e8), Level("four", 4, 2e-6, 2e9, uplink=7e8), LEVELS[1]))
"""The same where rows are spread over units of two levels, and no two devices are alike."""
MACHINES = pytest.mark.parametrize(
    "machine",
    [MACHINE, HELD, ISSUED, BLOCKED, SHARED, SHARED_AND_ISSUED, TREE],
    ids=["beside", "held", "issued", "blocked", "shared", "shared, issued", "tree"],
)


@cache
def program(seed: int) -> Module:
    return schedule(seed)


@cache
def simulated(seed: int) -> Simulation:
    return simulate_module(program(seed), MACHINE)


def test_the_programs_are_what_they_are_meant_to_be() -> None:
    calls = streams = waits = repeated = 0
    for seed in SEEDS:
        module = program(seed)
        verify(module, check)
        ops = [op for f in module.functions for op in f.ops]
        calls += sum(op.name == CALL for op in ops)
        streams += sum("stream" in op.attrs for op in ops)
        waits += sum(op.name == "wait" for op in ops)
        called = [op.attrs["callee"] for op in module.main.ops if op.name == CALL]
        repeated += len(called) > len(set(called))
    assert calls > 100
    assert streams == waits > 30
    assert repeated > len(SEEDS) / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_each_device_is_busy_or_idle_all_the_time(seed: int) -> None:
    found = simulated(seed)
    makespan = max(found.clocks)
    for c in range(len(found.members)):
        mine = [(s, s + e.duration, e.kind) for e, s in found.events() if c in e.classes and not e.stream]
        for kind in (COMPUTE, COMMUNICATION):
            assert sum(stop - start for start, stop, k in mine if k == kind) == found.busy[kind][c]
        ends = [0, *(stop for _, stop, _ in mine)]
        starts = [*(start for start, _, _ in mine), makespan]
        gaps = [start - end for start, end in zip(starts, ends, strict=True)]
        assert min(gaps) >= 0
        assert sum(gaps) + found.busy[COMPUTE][c] + found.busy[COMMUNICATION][c] == makespan
        device = int(found.members[c][0])
        assert found.idle[device] == pytest.approx(sum(gaps) / 1e15, abs=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_overlaps_on_a_stream_of_a_device(seed: int) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event, start in simulated(seed).events():
        assert event.duration > 0
        for c in event.classes:
            tracks.setdefault((c, event.stream), []).append((start, start + event.duration))
    for track in tracks.values():
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(track)))
        assert track == sorted(track), "program order"


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_worse_machine_is_never_faster(seed: int) -> None:
    def with_links(latency: float = 1, bandwidth: float = 1) -> Profile:
        levels = tuple(replace(n, latency=n.latency * latency, bandwidth=n.bandwidth / bandwidth) for n in LEVELS)
        return replace(MACHINE, levels=levels)

    vector = {dtype: rate / 3 for dtype, rate in MACHINE.vector.items()}
    worse = [
        with_links(latency=1.3), with_links(bandwidth=7),
        replace(MACHINE, overhead=1e-6), replace(MACHINE, vector=vector), replace(MACHINE, bandwidth=1e9),
        replace(MACHINE, dispatch=5e-6), BLOCKED, HELD, replace(MACHINE, collective_overhead=1e-6),
        replace(MACHINE, beside=0.9),
    ]  # fmt: skip
    before = simulated(seed).clocks
    slower = 0
    for profile in worse:
        after = simulate_module(program(seed), profile).clocks
        assert all(a >= b for a, b in zip(after[: len(before)], before, strict=True))
        slower += max(after) > max(before)
    assert slower >= len(worse) - 2


def where(found: Simulation, c: int) -> str:
    """The value at whose making a peak stands, as `inline` calls it."""
    return ".".join(op.results[0].name for op in found.peaks[c].ops)


@pytest.mark.drawn(20)
@MACHINES
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_give_exactly_what_the_inlined_program_gives(
    seed: int, machine: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without calls, ops may overwrite what a function must leave to its caller.
    monkeypatch.setattr(simulator, "reused_operands", lambda function: {})
    called, flat = (simulate_module(m, machine) for m in with_calls_and_without(program(seed), machine))
    assert (called.class_of == flat.class_of).all()
    assert called.clocks == flat.clocks
    assert called.busy == flat.busy
    assert called.streamed == flat.streamed
    assert called.hosted == flat.hosted
    assert called.device_ops == flat.device_ops
    assert [p.bytes for p in called.peaks] == [p.bytes for p in flat.peaks]
    assert [p.split for p in called.peaks] == [p.split for p in flat.peaks]
    assert [where(called, c) for c in range(len(called.peaks))] == [where(flat, c) for c in range(len(flat.peaks))]
    for device in range(called.devices):
        assert called.memory_curve(device) == flat.memory_curve(device)
    events = [
        [(e.op.name, e.classes, start, e.duration, e.kind, e.stream) for e, start in found.events()]
        for found in (called, flat)
    ]
    assert events[0] == events[1]


@pytest.mark.drawn(28)
@MACHINES
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_classes_of_devices_give_what_single_devices_give(
    seed: int, even: bool, machine: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = schedule(seed, even)
    classes = simulate_module(module, machine)
    assert len(classes.members) == (2 if even and machine is not TREE else 6)

    def apart(self: DeviceClasses, facts: object) -> None:
        self.of = np.arange(len(self.of))

    monkeypatch.setattr(DeviceClasses, "_refine", apart)
    single = simulate_module(module, machine)
    assert len(single.members) == single.devices == classes.devices
    of = classes.class_of.tolist()
    streams = range(len(single.clocks) // single.devices)
    for stream in streams:
        ours = [classes.clocks[c + stream * len(classes.members)] for c in of]
        assert ours == single.clocks[stream * single.devices : (stream + 1) * single.devices]
    for kind in (COMPUTE, COMMUNICATION):
        assert [classes.busy[kind][c] for c in of] == single.busy[kind]
    assert [classes.hosted[c] for c in of] == single.hosted
    assert [classes.peaks[c].bytes for c in of] == [p.bytes for p in single.peaks]
    assert classes.device_ops == single.device_ops
    for device in range(single.devices):
        assert classes.memory_curve(device) == single.memory_curve(device)
    assert classes.makespan == single.makespan


VIEWS = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[4,6] @ {0,1}, input %small: f64[2,6] @ {0}) {
    %plain = nn.relu(%small)
    %first = call @f(%plain) on {0}
    %whole = nn.relu(%x)
    %part @ {0} = strided_slice(%whole) {axes=(0,), begin=(1,), end=(3,), strides=(1,)}
    %second = call @f(%part) on {0}
    %after = nn.relu(%x)
    return "first": %first, "second": %second, "after": %after
  }
  func @f(input %x) {
    %y = nn.relu(%x)
    %z = nn.relu(%y)
    return "z": %z
  }
}
"""


def test_a_call_that_uses_a_view_for_the_last_time_frees_all_that_it_is_a_view_of() -> None:
    """On the devices of the call and on others; a call on a tensor of the same type that is no view frees less."""
    module = infer_types(parse(VIEWS))
    verify(module, check)
    called, flat = (simulate_module(m, MACHINE) for m in (module, inline(module)))
    x, small = 4 * 6 * 8, 2 * 6 * 8
    assert [sum(called.memory_curve(d)[-1][1]) for d in (0, 1)] == [2 * x + 3 * small, 2 * x]
    for device in (0, 1):
        assert called.memory_curve(device) == flat.memory_curve(device)
    assert called.peak_memory.tolist() == flat.peak_memory.tolist()
