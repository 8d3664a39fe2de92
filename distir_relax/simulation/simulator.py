"""Simulator: schedules the ops of a distributed program on device classes, and tracks live memory.

A domain of the abstract interpreter (section 3.3 of the DistIR paper). Equivalent devices are one class. Calls are
memoized: a function called again in the same state is not simulated again; its summary (effect on clocks, memory and
timeline) is reused. The state of a call consists of the clocks of its devices relative to the earliest, communications
in flight on their uplinks, the storage shared between operands, and which storage the call is the last to use. A
summary also applies to other device sets at an equivalent position in the topology (`SimulationPlan.topology_key`),
with classes renamed. Equal periods of the entry function are run once (`steady_state`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import uncached_share
from distir_relax.cost.scaling import faster
from distir_relax.errors import ProfileError, VerificationError
from distir_relax.executable.hoist import is_constant
from distir_relax.interpret.interpreter import Domain, Interpreter, SlotStep
from distir_relax.ir import Function, Module, Op, gc_disabled
from distir_relax.ops import lookup, reused_operands
from distir_relax.simulation.copies import Copies, layout_copies
from distir_relax.simulation.device_classes import Devices
from distir_relax.simulation.events import Event
from distir_relax.simulation.kept_values import as_executed, kept_storage, weights_of
from distir_relax.simulation.memory_categories import (
    ACTIVATIONS,
    GRADIENTS,
    RESIDENT,
    ROLE_CATEGORY,
    assembled_outputs,
    joined_outputs,
)
from distir_relax.simulation.op_timer import Bytes, OpEffect, OpTimer, TimedStep, femtoseconds
from distir_relax.simulation.recorded_programs import as_started
from distir_relax.simulation.reserved_memory import AllocatorReplays
from distir_relax.simulation.shared_links import InFlight, LinkState, absolute, delay, relative, with_transfer
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulation_plan import EntryCall, SimulationPlan
from distir_relax.simulation.simulator_state import Frame, Handle, Summary
from distir_relax.simulation.steady_state import Fold


def simulate_module(
    module: Module, profile: Profile, plan: SimulationPlan | None = None, repeats: Mapping[str, int] | None = None,
    is_recorded: bool | None = None, requests: int = 0, calls: SimulatedCalls | None = None,
) -> Simulation:  # fmt: skip
    """Simulate a program of the distributed stage on the machine of a profile, as its ranks execute it.

    It may be at the executable stage already (`as_executed`), as it is with a `plan`. That is of another program for
    the same profile, if available, which may differ only in sizes that are equal on all devices. `repeats` has how
    often in turn an op runs that is not to run once, by its first result; this takes time, but no more memory than one.
    `is_recorded` is whether a CPU backend records the program, by default as it does. It is a step of text
    generation for `requests` requests, or none if they are 0. The host's time around a program comes before its first
    op.
    `calls` are those of simulations of the same program with other records, by plans with the same functions
    (`SimulationPlan.with_records`).

    Raises `VerificationError` for a program that is not distributed or lacks types, `ProfileError` for one that uses
    more devices than the machine has.
    """
    if module.stage not in ("distributed", "executable") or module.ranks:
        raise VerificationError(f"a program of the distributed stage is simulated, found the {module.stage} stage")
    with gc_disabled():
        module = as_executed(module, plan.profile if plan else profile)
        # A plan that is made here is freed before the collector looks at it.
        calls, plan = calls or SimulatedCalls(), plan or SimulationPlan(module, profile)
        return _simulate(module, profile, plan, repeats or {}, is_recorded, requests, calls)


def _simulate(
    module: Module, profile: Profile, plan: SimulationPlan, repeats: Mapping[str, int], is_recorded: bool | None,
    requests: int, calls: SimulatedCalls,
) -> Simulation:  # fmt: skip
    devices = len(plan.classes.of)
    if devices == 1:
        profile = profile.of_one_device()
    profile = as_started(profile, module, plan.in_place, is_recorded)
    if profile.cores and devices > profile.cores:
        profile = _on_shared_cores(profile, profile.cores / devices)
    if devices > profile.devices:
        raise ProfileError(
            f"the program uses {devices} devices, the profile {profile.name} has {profile.devices}",
            hint="give a profile of more devices or nodes: NAME:NODES",
        )
    around = profile.request_step + requests * profile.request if requests else profile.step
    return _Simulator(module, profile, plan, repeats, calls).run(femtoseconds(around))


_CORE = ("device.flops", "device.bandwidth", "device.overhead", "runtime.times")
"""The figures of a device that its cores have, and that it shares with the other devices on them."""

ASSEMBLY_NOTE = "the outputs, assembled on rank 0"


def _on_shared_cores(profile: Profile, share: float) -> Profile:
    """Return the machine whose devices each have a `share` of a core, and of its part of the last cache."""
    return replace(faster(profile, _CORE, share), cores=0, cache=profile.cache * share)


_State = tuple[tuple[int, int, Bytes | None], ...]
"""For each operand: the first with the same storage, its category, and the bytes that the callee frees, or None."""


@dataclass(frozen=True, slots=True)
class _CallState:
    """A call, and the state in which it starts; `run` interprets the callee."""

    callee: Function
    devices: Devices
    clocks: tuple[int, ...]
    links: tuple[LinkState, ...]
    state: _State
    outputs: tuple[bool, ...]
    run: Callable[[Sequence[Handle]], list[Handle]]


@dataclass(frozen=True, slots=True)
class _CallSite:
    """Facts of the calls of a function on a device set: its classes, and clocks on which the callee depends.

    `streams` and `hosts` are these clocks, each with that of its device. `ahead` is an upper bound of the time in which
    a host issues all ops of the callee. `links` are the uplinks of the devices' units. `elsewhere` has, by storage (the
    id of its bytes), the bytes on other classes.
    """

    devices: Devices
    callee: Function
    classes: tuple[int, ...]
    streams: tuple[tuple[int, int], ...]
    hosts: tuple[tuple[int, int], ...]
    ahead: int
    links: tuple[int, ...]
    elsewhere: dict[int, Bytes] = field(default_factory=dict)


@dataclass
class SimulatedCalls:
    """Calls that were simulated, by their states, for simulations of programs that differ in nothing but records."""

    timer: OpTimer | None = None
    allocators: AllocatorReplays = field(default_factory=AllocatorReplays)
    effects: dict[tuple[str, int], dict[tuple[int, tuple[bool, ...]], OpEffect]] = field(default_factory=dict)
    """Effects of ops, by function and the id of its devices."""
    copies: dict[str, Copies] = field(default_factory=dict)
    """Copies due to strides, by function."""
    reused: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """Operands that ops overwrite, by function."""
    summaries: dict[object, Summary] = field(default_factory=dict)
    by_topology: dict[object, Summary] = field(default_factory=dict)
    """Summaries by topology key instead of devices."""
    bytes: dict[Bytes, Bytes] = field(default_factory=dict)
    issue_times: dict[str, int] = field(default_factory=dict)
    sites: dict[tuple[str, int, int], _CallSite] = field(default_factory=dict)
    """Call sites by callee, and the ids of the devices of the call and of its caller."""


@dataclass
class _Simulator(Domain[Handle]):
    module: Module
    profile: Profile
    plan: SimulationPlan
    repeats: Mapping[str, int]
    calls: SimulatedCalls
    timer: OpTimer = field(init=False)
    layers: int = field(init=False)
    """The number of clocks of a class: its own, those of streams, and that of its host if it has one."""
    frames: list[Frame] = field(default_factory=list)
    uses_residency: bool = field(init=False)
    """Whether the time of an op may depend on whether its operands are weights or gradients."""
    _simple_summaries: dict[object, Summary] = field(default_factory=dict)
    """Summaries of the entry's calls whose operands do not share storage, by the storage of each operand."""

    def __post_init__(self) -> None:
        self.layers = len(self.plan.streams) + 1 + self.profile.is_asynchronous
        self.timer = self.calls.timer = self.calls.timer or self._new_timer()
        self.uses_residency = bool(self.timer.uncached)

    def _new_timer(self) -> OpTimer:
        plan = self.plan
        timer = OpTimer(self.profile, plan.classes, plan.streams)
        weights = [0] * plan.classes.count
        for value in weights_of(self.module, self.module.main).values():
            for c, size in timer.bytes_of(value, None):
                weights[c] += size
        # A step with updates also touches gradients, and two states of an optimizer.
        factor = 4 if plan.in_place else 1
        if self.profile.cache:
            shares = {c: uncached_share(factor * size, self.profile.cache) for c, size in enumerate(weights)}
            timer.uncached = {c: share for c, share in shares.items() if share}
        return timer

    def run(self, start: int) -> Simulation:
        """Simulate the entry function from a time in femtoseconds on, for which all devices wait."""
        main, classes = self.module.main, self.plan.classes
        frame = self.enter(main, None, [start] * (classes.count * self.layers), (False,) * len(main.outputs))
        slots: list[Handle | None] = [None] * self.plan.program.slots
        input_bytes: dict[tuple[int, int], int] = defaultdict(int)
        kept, counted = kept_storage(self.module, main), set[str]()
        for slot, number in enumerate(self.plan.entry.inputs):
            item = main.inputs[number]
            value, category = kept.get(item.value.name, item.value), ROLE_CATEGORY[item.role]
            bytes_ = self.timer.bytes_of(value, None)
            slots[slot] = Handle(bytes_, category, False, 1, slot)
            if value.name not in counted:
                for c, size in bytes_:
                    input_bytes[c, category] += size
            if is_constant(item):
                counted.add(value.name)
        for (c, category), size in input_bytes.items():
            frame.change(((c, size),), category, 1)
        frame.note_peak([(c, 0) for c in range(classes.count)], None)
        self._run_entry(frame, slots)
        self._assemble_outputs(frame)
        return Simulation(
            self.module, self.profile, classes.of, classes.members, frame.clocks, frame.busy, frame.streamed,
            frame.peaks, frame.events, frame.changes, frame.device_ops, hosted=frame.hosted,
            allocators=self.calls.allocators,
        )  # fmt: skip

    def _assemble_outputs(self, frame: Frame) -> None:
        """Assemble the outputs on rank 0, whose devices share the host's memory; microbatches are concatenated last."""
        if self.profile.kind != "cpu":
            return
        first_class, sizes = int(self.plan.classes.of[0]), {}
        for record, takes_room in assembled_outputs(self.module):
            sizes[record.output] = record.bytes
            if takes_room:
                frame.change(((first_class, record.bytes),), ACTIVATIONS, 1)
                frame.note_peak([(first_class, record.buffer)], None, ASSEMBLY_NOTE)
        for joined in joined_outputs(self.module):
            frame.change(((first_class, sum(sizes.get(name, 0) for name in joined.parts)),), ACTIVATIONS, 1)
            frame.note_peak([(first_class, 0)], None, ASSEMBLY_NOTE)

    def _run_entry(self, frame: Frame, slots: list[Handle | None]) -> None:
        interpreter = Interpreter(self.module, self, self.plan.programs)
        ops, cycle = self.plan.entry.ops(self.module.main), self.plan.cycle
        number = 0
        if cycle is not None:
            frame.hosts = frame.classes if self.profile.is_asynchronous else 0
            fold = Fold(cycle, frame, ops, slots)
            for start in range(cycle.start, cycle.stop, cycle.length):
                self._run_steps(frame, slots, interpreter, ops, range(number, start))
                number = fold.advance(start)
                if number > start:
                    break
        self._run_steps(frame, slots, interpreter, ops, range(number, len(ops)))

    def _run_steps(
        self,
        frame: Frame,
        slots: list[Handle | None],
        interpreter: Interpreter[Handle],
        ops: Sequence[Op],
        numbers: range,
    ) -> None:
        steps, plan = self.plan.program.steps, self.plan
        for number in numbers:
            op, step = ops[number], steps[number]
            if step.callee:
                results = self._entry_call(frame, op, step, plan.call(number), slots, interpreter)
            else:
                results = self.apply(op, [slots[i] for i in step.operands])  # type: ignore[misc]
            for i, result in zip(step.results, results, strict=True):
                slots[i] = result
            for i in step.dead:
                handle: Handle = slots[i]  # type: ignore[assignment]
                slots[i] = None
                handle.users -= 1
                if not handle.users and handle.freeable:
                    self._free(handle)

    def enter(self, function: Function, devices: Devices | None, clocks: list[int], outputs: tuple[bool, ...]) -> Frame:
        """Push a frame for a function on `devices`, None for the entry function."""
        # The ops of the entry function are made for each simulation: their ids are used again.
        effects = {} if devices is None else self.calls.effects.setdefault((function.name, id(devices)), {})
        gradients, stream_of = self.plan.gradients.of(function, outputs), self.plan.streams_of(function)
        calls = self.calls
        if function.name not in calls.copies:
            calls.copies[function.name] = layout_copies(function)
            calls.reused[function.name] = reused_operands(function) if self.profile.in_place else {}
        copies, reused, count = calls.copies[function.name], calls.reused[function.name], self.plan.classes.count
        self.frames.append(Frame(devices, gradients, stream_of, copies, reused, clocks, count, effects))
        return self.frames[-1]

    def apply(self, op: Op, operands: Sequence[Handle]) -> list[Handle]:
        frame = self.frames[-1]
        # Persistent data is evicted from a cache by the rest of the step.
        resident: tuple[bool, ...] = ()
        if self.uses_residency:
            resident = (*[h.category in RESIDENT for h in operands], *[v.name in frame.gradients for v in op.results])
        key = (id(op), resident)
        if (effect := frame.effects.get(key)) is None:
            reused = frame.reused.get(op.results[0].name) if op.results else None
            effect = self.timer.effect(op, frame.devices, frame.stream_of, resident, frame.copies, reused)
            if op.results and op.results[0].name in self.repeats:
                effect = effect.repeated(self.repeats[op.results[0].name])
            frame.effects[key] = effect
        results = []
        for value, bytes_ in zip(op.results, effect.allocates, strict=True):
            if bytes_ is None:
                source = operands[effect.source]
                source.users += 1
                results.append(source)
                if value.name in frame.gradients and value.name in frame.reused:
                    frame.change(source.bytes, source.category, -1)
                    source.category = GRADIENTS
                    frame.change(source.bytes, source.category, 1)
                continue
            results.append(Handle(bytes_, GRADIENTS if value.name in frame.gradients else ACTIVATIONS, True))
            frame.change(bytes_, results[-1].category, 1)
        if effect.takes_memory:
            frame.note_peak(effect.workspace, op)
        self._advance(frame, op, effect, operands, results)
        frame.device_ops += effect.devices
        return results

    def _advance(
        self, frame: Frame, op: Op, effect: OpEffect, operands: Sequence[Handle], results: Sequence[Handle]
    ) -> None:
        """Advance the clocks by an op, and note when its devices are busy."""
        clocks = frame.clocks
        busy = frame.streamed if effect.stream else frame.busy[effect.kind]
        frame.host_waits += len(effect.synchronizes)
        for host, device in effect.synchronizes:
            clocks[host] = max(clocks[host], clocks[device])
            frame.synchronized.add(host)
        for host, duration in effect.issues:
            clocks[host] += duration
        started: list[tuple[TimedStep, int]] = []
        for step in effect.steps:
            start = max([clocks[c] for c in step.waits])
            if step.hosts:
                start = self._issued(frame, step, start)
            if step.links:
                started.append((step, start))
                step = self._slowed(frame, step, start)
            for c in step.sets:
                clocks[c] = start + step.duration
            for c in step.classes:
                busy[c] += step.duration - step.blocked
            # On a stream, the last clocks that it waits for are those of the stream.
            waits = step.waits[: -len(step.classes)] or step.classes
            frame.events.append(Event(op, step.classes, start, step.duration, effect.kind, effect.stream, waits))
            if effect.stream:
                ready = results[0].ready = results[0].ready or {}
                for c in step.classes:
                    ready[c] = start + step.duration
                    if step.blocked:
                        frame.events.append(Event(op, (c,), clocks[c], step.blocked, effect.kind, 0))
                        frame.busy[effect.kind][c] += step.blocked
                        clocks[c] += step.blocked
        if started:
            self._occupy(frame, started)
        if effect.joined_classes:
            frame.join(op, effect.joined_classes, operands[0].ready or {})

    def _slowed(self, frame: Frame, step: TimedStep, start: int) -> TimedStep:
        """Return a step that starts at a time, with the delay due to other communications on its uplinks."""
        extra = delay(step.links, frame.links, start)
        if not extra:
            return step
        duration = step.duration + extra
        return replace(step, duration=duration, blocked=round(step.blocked * duration / step.duration))

    def _occupy(self, frame: Frame, started: Sequence[tuple[TimedStep, int]]) -> None:
        """Note that an op occupies uplinks: once, though several of its groups use one, whose times account for it."""
        uses: dict[int, tuple[int, int]] = {}
        for step, start in started:
            for use in step.links:
                first, occupied = uses.get(use.link, (start, 0))
                uses[use.link] = min(first, start), max(occupied, use.occupied)
        for link, (start, occupied) in uses.items():
            frame.links[link] = with_transfer(frame.links.get(link), start, occupied)

    def _issued(self, frame: Frame, step: TimedStep, start: int) -> int:
        """Return when a step can start that its devices could start at `start`, and its hosts have just issued."""
        issued = max([frame.clocks[host] for host in step.hosts])
        if issued > start:
            frame.host_waits += 1
            if step.sets[0] < frame.classes:
                for c in step.classes:
                    frame.hosted[c] += issued - start
        frame.synchronized.update([clock for clock in step.sets if clock in step.hosts])
        return max(start, issued)

    def release(self, element: Handle) -> None:
        element.users -= 1
        if not element.users and element.freeable:
            self._free(element)

    def _free(self, handle: Handle) -> None:
        frame = self.frames[-1]
        frame.change(handle.bytes, handle.category, -1)
        frame.freed.add(handle.number)
        handle.freeable = False

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[Handle],
        last: Sequence[bool],
        run: Callable[[Sequence[Handle]], list[Handle]],
    ) -> list[Handle]:
        frame = self.frames[-1]
        site = self._site(op, callee.name, frame) or self._add_site(op, callee, frame)
        clocks, base = self._relative(frame, site)
        outputs = tuple([v.name in frame.gradients for v in op.results])
        state = self._state(operands, last, site.devices)
        links = self._links(frame, site, base)
        summary = self._summary(_CallState(callee, site.devices, clocks, links, state, outputs, run))
        return self._resume(frame, op, summary, site, operands, range(len(operands)), base)

    def _entry_call(
        self,
        frame: Frame,
        op: Op,
        step: SlotStep,
        call: EntryCall,
        slots: Sequence[Handle | None],
        interpreter: Interpreter[Handle],
    ) -> list[Handle]:
        """Simulate a call of the entry function; fast lookup for the common case, where operands other than entry
        inputs have storage of their own."""
        site = self._site(op, step.callee, frame) or self._add_site(op, self.module.function(step.callee), frame)
        clocks, base = self._relative(frame, site)
        computed: list[Handle] = [slots[i] for i in call.computed]  # type: ignore[misc]
        signature = tuple([(id(h.bytes), h.category, h.users) if h.freeable else h.category for h in computed])
        links = self._links(frame, site, base)
        key = (call.key, id(site.devices), clocks, links, signature)
        is_simple = (
            call.key >= 0
            and len(set(computed)) == len(computed)
            and call.inputs.isdisjoint([h.number for h in computed if h.number >= 0])
        )
        summary = self._simple_summaries.get(key) if is_simple else None
        if summary is None:
            operands: list[Handle] = [slots[i] for i in step.operands]  # type: ignore[misc]
            state = self._state(operands, step.last, site.devices)
            callee, run = interpreter.enter(step.callee)
            summary = self._summary(_CallState(callee, site.devices, clocks, links, state, call.outputs, run))
            if is_simple:
                self._simple_summaries[key] = summary
        return self._resume(frame, op, summary, site, slots, step.operands, base)

    def _site(self, op: Op, callee: str, frame: Frame) -> _CallSite | None:
        return self.calls.sites.get((callee, id(op.attrs["devices"]), id(frame.devices)))

    def _add_site(self, op: Op, callee: Function, frame: Frame) -> _CallSite:
        local_devices: Devices = op.attrs["devices"]  # type: ignore[assignment]
        devices = self.plan.classes.map_devices(local_devices, frame.devices)
        classes, count = self.timer.classes_of(devices), frame.classes
        streams: list[tuple[int, int]] = []
        if self.plan.uses_streams(callee):
            streams = [(c + s * count, c) for c in classes for s in range(1, len(self.plan.streams) + 1)]
        hosts: list[tuple[int, int]] = []
        if self.profile.is_asynchronous:
            hosts = [(c + (self.layers - 1) * count, c) for c in classes]
        ahead, links = self._issue_time(callee), self.timer.links_of(devices)[0]
        site = _CallSite(devices, callee, classes, tuple(streams), tuple(hosts), ahead, links)
        # The ids stay those of these devices: the plan's classes keep both.
        self.calls.sites[callee.name, id(local_devices), id(frame.devices)] = site
        return site

    def _state(self, operands: Sequence[Handle], last: Sequence[bool], devices: Devices) -> _State:
        # Find storage whose remaining uses are all in this call.
        uses: dict[int, int] = {}
        for handle, is_last in zip(operands, last, strict=True):
            if is_last:
                uses[id(handle)] = uses.get(id(handle), 0) + 1
        first_with: dict[int, int] = {}
        # Only bytes on the devices of the call are freed by it; a view's storage may be on more than its type.
        return tuple(
            [
                (
                    first_with.setdefault(id(h), i),
                    h.category,
                    self.timer.split_on(h.bytes, devices)[0] if h.freeable and uses.get(id(h)) == h.users else None,
                )
                for i, h in enumerate(operands)
            ]
        )

    def _relative(self, frame: Frame, site: _CallSite) -> tuple[tuple[int, ...], int]:
        """Return the clocks of a call's classes relative to the earliest, with those of hosts, and of streams if
        used."""
        clocks = frame.clocks
        base = min([clocks[c] for c in site.classes])
        result = [clocks[c] - base for c in site.classes]
        if site.streams:
            # A stream behind its device's own clock is idle: clamp.
            result += [max(clocks[stream], clocks[c]) - base for stream, c in site.streams]
        for host, c in site.hosts:
            # No device waits for a host that is this far ahead.
            time = clocks[c] - site.ahead
            if clocks[host] > time:
                frame.host_waits += 1
                time = clocks[host]
            result.append(time - base)
        return tuple(result), base

    def _links(self, frame: Frame, site: _CallSite, base: int) -> tuple[LinkState, ...]:
        """Return the states of the uplinks of a call's devices relative to its base, empty if all are idle."""
        if not frame.links:
            return ()
        states = tuple([relative(frame.links.get(link), base) for link in site.links])
        return states if any(states) else ()

    def _issue_time(self, function: Function) -> int:
        """Return an upper bound of the time in which a host issues all ops of a function."""
        result = self.calls.issue_times.get(function.name)
        if result is None:
            longest = femtoseconds(max(self.profile.dispatch, self.profile.view))
            result = 0
            for op in function.ops:
                if op.callee:
                    result += self._issue_time(self.module.function(op.callee))
                elif shape_ops := lookup(op.name, op.location).cost.shape_ops:
                    result += femtoseconds(self.profile.shape_op * shape_ops((), op.attrs, ()))
                else:
                    result += longest * max(1, len(op.results))
            self.calls.issue_times[function.name] = result
        return result

    def _summary(self, call: _CallState) -> Summary:
        key = (call.callee.name, id(call.devices), call.clocks, call.links, call.state, call.outputs)
        summary = self.calls.summaries.get(key)
        if summary is None:
            summary = self.calls.summaries[key] = self._equivalent_summary(call)
        return summary

    def _equivalent_summary(self, call: _CallState) -> Summary:
        """Simulate a call, or relocate the summary of an equivalent call on other devices."""
        classes = self.timer.classes_of(call.devices)
        position = {c: i for i, c in enumerate(classes)}
        storage = tuple(
            [(i, k, None if b is None else tuple([(position[c], size) for c, size in b])) for i, k, b in call.state]
        )
        uncached = tuple([self.timer.uncached.get(c, 0.0) for c in classes])
        topology = self.plan.topology_key(call.devices, classes)
        pattern = self.timer.links_of(call.devices)[1]
        key = (call.callee.name, topology, uncached, call.clocks, call.links, pattern, storage, call.outputs)
        summary = self.calls.by_topology.get(key)
        if summary is None:
            summary = self.calls.by_topology[key] = self._simulate(call)
            return summary
        mapping = dict(zip(self.timer.classes_of(summary.devices), classes, strict=True))
        return summary.relocate(call.devices, mapping, self.plan.classes.count, self.calls.bytes)

    def _simulate(self, call: _CallState) -> Summary:
        devices, clocks = call.devices, call.clocks
        classes, count = self.timer.classes_of(devices), self.plan.classes.count
        indices = list(classes)
        if self.plan.uses_streams(call.callee):
            indices += [c + s * count for c in classes for s in range(1, len(self.plan.streams) + 1)]
        hosts = [c + (self.layers - 1) * count for c in classes] if self.profile.is_asynchronous else []
        indices += hosts
        initial = [0] * (count * self.layers)
        for index, clock in zip(indices, clocks, strict=True):
            initial[index] = clock
        frame = self.enter(call.callee, devices, list(initial), call.outputs)
        links = self.timer.links_of(devices)[0]
        in_flight = {link: absolute(s, 0) for link, s in zip(links, call.links, strict=False) if s}
        frame.links.update(in_flight)
        handles: list[Handle] = []
        for i, (first, category, own_bytes) in enumerate(call.state):
            if first != i:
                handles[first].users += 1
                handles.append(handles[first])
            else:
                handles.append(Handle(own_bytes or (), category, own_bytes is not None, number=i))
        results = call.run(handles)
        self.frames.pop()
        new_ids: dict[int, int] = {}
        outputs = tuple((h.number, -1 if h.number >= 0 else new_ids.setdefault(id(h), len(new_ids))) for h in results)
        new = {id(h): (h.bytes, h.category) for h in results if h.number < 0}
        # A host that does not wait advances by the same time whenever it is called.
        ahead = [host for host in hosts if host not in frame.synchronized]
        changed = [index for index in indices if frame.clocks[index] != initial[index]]
        totals = tuple(
            (
                c, frame.peaks[c], frame.live[c] if any(frame.live[c]) else None, frame.total[c], frame.streamed[c],
                frame.hosted[c], frame.busy[0][c], frame.busy[1][c],
            )
            for c in classes
        )  # fmt: skip
        return Summary(
            devices, frame.events, frame.changes, frame.device_ops, outputs, tuple(new.values()),
            clocks_after=tuple([(index, frame.clocks[index]) for index in changed if index not in ahead]),
            hosts_ahead=tuple([(index, frame.clocks[index] - initial[index]) for index in ahead if index in changed]),
            synchronized=frozenset(frame.synchronized),
            freed=tuple(number for number in frame.freed if number >= 0),
            class_totals=totals,
            links_after=_changed_links(links, in_flight, frame.links),
        )  # fmt: skip

    def _resume(
        self,
        frame: Frame,
        op: Op,
        summary: Summary,
        site: _CallSite,
        slots: Sequence[Handle | None],
        slot_of: Sequence[int],
        base: int,
    ) -> list[Handle]:
        """Resume the caller after a call; operand i of the call is in slot ``slot_of[i]``."""
        frame.apply_summary(op, summary, base, site.links)
        for number in summary.freed:
            handle: Handle = slots[slot_of[number]]  # type: ignore[assignment]
            handle.freeable = False
            frame.freed.add(handle.number)
            elsewhere = site.elsewhere.get(id(handle.bytes))
            if elsewhere is None:
                # All bytes of handles are kept by the timer and by summaries: ids are not reused.
                elsewhere = self.timer.split_on(handle.bytes, site.devices)[1]
                site.elsewhere[id(handle.bytes)] = elsewhere
            if elsewhere:
                frame.change(elsewhere, handle.category, -1)
        handles = [Handle(bytes_, category, True, 0) for bytes_, category in summary.allocations]
        results = []
        for number, new in summary.outputs:
            result: Handle = slots[slot_of[number]] if number >= 0 else handles[new]  # type: ignore[assignment]
            result.users += 1
            results.append(result)
        return results


def _changed_links(
    links: Sequence[int], before: Mapping[int, InFlight], after: Mapping[int, InFlight]
) -> tuple[tuple[int, LinkState], ...]:
    """Return the positions among `links` of those that a call has used, with their states at its end."""
    changed = [(number, after[link]) for number, link in enumerate(links) if after.get(link) != before.get(link)]
    return tuple([(number, (time, *left)) for number, (time, left) in changed])
