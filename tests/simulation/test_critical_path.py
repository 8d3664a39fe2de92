"""Critical paths: their durations add up to the makespan, and each step depends on the one before it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from distir_relax.compiler.simulate import simulate
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.interpret.type_propagation import infer_types
from distir_relax.ir import Module, Op, inline, parse, verify
from distir_relax.ops import check
from distir_relax.simulation import simulator
from distir_relax.simulation.critical_path import HOST, CriticalPath, critical_path
from distir_relax.simulation.device_classes import DeviceClasses
from distir_relax.simulation.events import Event
from distir_relax.simulation.op_timer import OpEffect, OpTimer
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module
from tests import mlp
from tests.machines import link
from tests.machines import machine as made
from tests.simulation.pipelines import pipeline
from tests.simulation.schedules import schedule, with_calls_and_without
from tests.simulation.test_microbatch_expansion import trained
from tests.simulation.test_simulator import HELD, MACHINE, MACHINES

SEEDS = range(10)


@cache
def program(seed: int) -> Module:
    return schedule(seed)


def whole(found: Simulation) -> CriticalPath:
    """The path, which goes from the beginning to the end of the simulation without a gap."""
    path = critical_path(found)
    assert path.makespan == max(found.clocks)
    assert all(step.duration > 0 for step in path.steps)
    assert not path.steps or path.steps[0].start == 0
    assert all(first.end == second.start for first, second in pairwise(path.steps))
    assert all(step.device_class in step.classes for step in path.steps)
    assert not path.of_kind(HOST) or found.profile.is_asynchronous
    return path


def plain(path: CriticalPath) -> list[tuple[Any, ...]]:
    return [(step.name, step.classes, step.stream, step.start, step.duration) for step in path.steps]


@pytest.mark.drawn(23)
@MACHINES
@pytest.mark.parametrize("seed", SEEDS)
def test_calls_have_the_path_of_the_inlined_program(
    seed: int, machine: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "reused_operands", lambda function: {})
    called, flat = (whole(simulate_module(m, machine)) for m in with_calls_and_without(program(seed), machine))
    assert plain(called) == plain(flat)
    assert any(step.calls for step in called.steps) or not any(step.calls for step in flat.steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_devices_that_do_the_same_have_one_path(seed: int) -> None:
    found = simulate_module(schedule(seed, even=True), HELD)
    assert len(found.members) == 2
    assert whole(found).steps


Node = int


class Graph:
    """The dependencies of the events of a program without calls, from its text: op by op, on single devices."""

    def __init__(self, module: Module, found: Simulation) -> None:
        self.events = [(event, start) for event, start in found.events()]
        self.before: list[set[Node]] = [set() for _ in self.events]
        of_op: dict[int, list[Node]] = defaultdict(list)
        for node, (event, _) in enumerate(self.events):
            of_op[id(event.op)].append(node)
        own: dict[int, set[Node]] = defaultdict(set)
        stream: dict[tuple[int, int], Node] = {}
        producers: dict[str, list[Node]] = {}
        for op in module.main.ops:
            if op.name == "wait":
                for device in op.results[0].placed.devices:
                    own[device] |= {n for n in producers[op.operands[0].name] if device in self.events[n][0].classes}
                continue
            nodes = of_op[id(op)]
            for node in nodes:
                event = self.events[node][0]
                for device in self._starting(op, event):
                    self.before[node] |= own[device]
                for device in event.classes:
                    key = (device, event.stream)
                    if event.stream and key in stream:
                        self.before[node].add(stream[key])
                for device in event.classes:
                    if event.stream:
                        stream[device, event.stream] = node
                    else:
                        own[device] = {node}
            if nodes:
                producers[op.results[0].name] = [n for n in nodes if self.events[n][0].stream]

    @staticmethod
    def _starting(op: Op, event: Event) -> tuple[int, ...]:
        """A send on a stream waits for its sender alone, everything else for all of its devices."""
        if op.name != "send" or not event.stream:
            return event.classes
        pairs = zip(op.operands[0].placed.devices, op.results[0].placed.devices, strict=True)
        return next((source,) for source, target in pairs if {source, target} == set(event.classes))

    def longest(self) -> int:
        """The longest path, by dynamic programming over the dependencies alone."""
        ends: list[int] = []
        for node, (event, _) in enumerate(self.events):
            ends.append(max([ends[n] for n in self.before[node]], default=0) + event.duration)
        return max(ends, default=0)


@pytest.fixture
def single_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device is a class of its own."""

    def apart(self: DeviceClasses, facts: object) -> None:
        self.of = np.arange(len(self.of))

    monkeypatch.setattr(DeviceClasses, "_refine", apart)


def on_streams(module: Module) -> Module:
    """The program with each other send on a stream, waited for where it is used first."""
    ops: list[Op] = []
    renamed: dict[str, Any] = {}
    sends = 0
    for op in module.main.ops:
        operands = tuple(renamed.get(v.name, v) for v in op.operands)
        op = Op(op.name, operands, op.results, op.attrs, op.location)
        sends += op.name == "send"
        if op.name == "send" and sends % 2:
            value = op.results[0]
            pending = replace(value, name=f"{value.name}.pending")
            ops.append(Op(op.name, operands, (pending,), {**op.attrs, "stream": "up"}, op.location))
            renamed[value.name] = pending
            continue
        waits = [v.name for v in operands if v.name.endswith(".pending")]
        for name in dict.fromkeys(waits):
            pending = next(v for v in operands if v.name == name)
            value = replace(pending, name=name.removesuffix(".pending"))
            ops.append(Op("wait", (pending,), (value,), {}, op.location))
            renamed[value.name] = value
        if waits:
            operands = tuple(renamed.get(v.name.removesuffix(".pending"), v) for v in operands)
            op = Op(op.name, operands, op.results, op.attrs, op.location)
        ops.append(op)
    outputs = []
    for output in module.main.outputs:
        value = renamed.get(output.value.name, output.value)
        if value.name.endswith(".pending"):
            ops.append(Op("wait", (value,), (output.value,), {}))
        outputs.append(output)
    main = replace(module.main, ops=tuple(ops), outputs=tuple(outputs))
    return replace(module, functions=(main, *module.functions[1:]))


@pytest.mark.usefixtures("single_devices")
@pytest.mark.parametrize("profile", [MACHINE, HELD], ids=["beside", "held"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_path_is_a_longest_path_of_the_dependencies(seed: int, profile: Profile) -> None:
    module = on_streams(inline(program(seed)))
    verify(module, check)
    found = simulate_module(module, profile)
    graph = Graph(module, found)
    assert graph.longest() == max(found.clocks)
    path = whole(found)
    numbers = {(id(e.op), e.classes, e.stream, start): n for n, (e, start) in enumerate(graph.events)}
    nodes = [numbers[id(step.op), step.classes, step.stream, step.start] for step in path.steps]
    assert not graph.before[nodes[0]] or path.steps[0].start == 0
    assert all(first in graph.before[second] for first, second in pairwise(nodes))


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("single_devices")
@pytest.mark.parametrize("seed", [0, 3, 7])
def test_only_ops_on_the_path_change_the_makespan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_streams(inline(program(seed)))
    found = simulate_module(module, HELD)
    on_path = {id(step.op) for step in whole(found).steps}
    effect_of = OpTimer.effect
    gained = 0
    for op in module.main.ops:

        def effect(self: OpTimer, other: Op, *rest: Any, op: Op = op) -> OpEffect:
            result = effect_of(self, other, *rest)
            if other is not op:
                return result
            return replace(result, steps=tuple(replace(s, duration=s.duration // 3, blocked=s.blocked // 3)
                                               for s in result.steps))  # fmt: skip

        monkeypatch.setattr(OpTimer, "effect", effect)
        shorter = max(simulate_module(module, HELD).clocks)
        assert shorter <= max(found.clocks)
        if id(op) not in on_path:
            assert shorter == max(found.clocks)
        gained += shorter < max(found.clocks)
    assert gained


IN_A_CALL = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[5,5] @ {0}, input %y: f64[5,5] @ {1}) {
    %a = matmul(%x, %x)
    %b = matmul(%y, %y)
    %c = matmul(%b, %b)
    %d, %e = call @f(%a, %c) on {0,1}
    return "d": %d, "e": %e
  }
  func @f(input %x: f64[5,5] @ {0}, input %y: f64[5,5] @ {1}) {
    %pending @ {1} = send(%x) {stream="up"}
    %z = matmul(%y, %y)
    %got = wait(%pending)
    %w = matmul(%z, %got)
    %u = matmul(%x, %x)
    return "w": %w, "u": %u
  }
}
"""


@pytest.mark.parametrize("latency", [1e-7, 1e-4, 1e-2])
def test_a_send_on_a_stream_of_a_call_waits_for_the_receiver_to_be_called(latency: float) -> None:
    module = infer_types(parse(IN_A_CALL))
    verify(module, check)
    profile = made(2, link(latency, float("inf")), flops=1e6)
    path = whole(simulate_module(module, profile))
    product = 250 * 10**9
    assert path.makespan == 2 * product + max(product, round(latency * 1e15)) + product
    assert ["send" in (step.name for step in path.steps), len(path.steps)] == [latency > 250e-6, 4]


STRATEGIES = [
    "3/1/1/5,zero=2", "1/3/1/4", "1/1/3/7,schedule=gpipe", "1/1/3/7", "1/1/2/7,schedule=interleaved,chunks=3",
    "1/3/2/5,schedule=zb-h1", "2/1/2/6,zero=1", "1/1/2/6,schedule=zb-v,chunks=2",
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_of_training_on_uneven_ranks(strategy: str) -> None:
    module = mlp.program(6, 127, strategy, 35)
    for name in ("dgx2-v100", "dgx-h100", "cpu-local"):
        assert whole(simulate(module, profile=load_profile(name).with_devices(6))).steps


def test_microbatches_that_stand_for_all_have_the_path_of_all() -> None:
    profile = load_profile("dgx2-v100")
    source = trained(23, "1/1/3/13", profile)
    few, every = (whole(simulate_module(source.distributed(repeated=r), profile)) for r in (True, False))
    assert plain(few) == plain(every)


@pytest.mark.parametrize(("schedule_name", "stages", "microbatches"), [("gpipe", 3, 5), ("1f1b", 5, 7)])
def test_a_pipeline_of_equal_stages_is_bound_by_its_fill_and_its_longest_stage(
    schedule_name: str, stages: int, microbatches: int
) -> None:
    found = simulate_module(pipeline(schedule_name, stages, microbatches), made(stages, link(0, float("inf"))))
    path = whole(found)
    # A forward task is one product, a backward task two.
    assert len(path.steps) == 3 * (microbatches + stages - 1)


def test_time_that_no_clock_explains_is_the_hosts() -> None:
    module = infer_types(parse(IN_A_CALL))
    found = simulate_module(module, made(2, link(1e-4, float("inf")), flops=1e6))
    late = [e._replace(start=e.start + 7) if isinstance(e, Event) else e._replace(base=e.base + 9)
            for e in found.steps]  # fmt: skip
    clocks = [clock + 20 if clock == max(found.clocks) else clock for clock in found.clocks]
    path = critical_path(replace(found, _events=late, clocks=clocks))
    assert path.makespan == max(clocks)
    assert [step.duration for step in path.steps if step.kind == HOST] == [7, 2, 11]
    assert path.steps[-1].op is None
    assert [first.end == second.start for first, second in pairwise(path.steps)].count(False) == 0


def test_a_program_that_takes_no_time_has_no_path() -> None:
    found = simulate_module(infer_types(parse(IN_A_CALL)), made(2, link(0, float("inf")), flops=float("inf")))
    assert whole(found).steps == ()
