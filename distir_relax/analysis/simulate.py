"""The simulator: when each op of a distributed program runs on each device, and what memory is live.

A domain of the abstract interpreter (section 3.3 of the DistIR paper). Devices that do the same are one class, and a
function that is called again in the same state is not simulated again: its clocks, memory and time line are reused.
The state of a call is how far apart the clocks of its devices are, and which operands it uses for the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.analysis.classes import DeviceClasses, Devices
from distir_relax.analysis.interpreter import Domain, Interpreter, steps_of
from distir_relax.analysis.memory import ACTIVATIONS, CATEGORIES, GRADIENTS, LASTING, OF_ROLE, WORKSPACE, Gradients
from distir_relax.analysis.repeated import repeated_steps
from distir_relax.analysis.simulation import Called, Change, Event, Peak, Simulation
from distir_relax.analysis.work import Bytes, Planner, Work
from distir_relax.cost.profile import Profile
from distir_relax.errors import ProfileError, VerificationError
from distir_relax.ir import Function, Module, Op, Repeated, Value, uncollected
from distir_relax.ops import lookup


def simulate_module(module: Module, profile: Profile) -> Simulation:
    """Run a program of the distributed stage on the machine of a profile, without running it.

    Raises `VerificationError` for a program that is not of that stage or lacks types, `ProfileError` for one that uses
    devices which the machine does not have.
    """
    if module.stage != "distributed":
        raise VerificationError(f"a program of the distributed stage is simulated, found the {module.stage} stage")
    classes = DeviceClasses(module, profile)
    if len(classes.of) == 1 and profile.bandwidth_alone:
        profile = replace(profile, bandwidth=profile.bandwidth_alone)
    if len(classes.of) > profile.devices:
        raise ProfileError(
            f"the program uses {len(classes.of)} devices, the profile {profile.name} has {profile.devices}",
            hint="give a profile of more devices or nodes",
        )
    with uncollected():
        return _simulated(module, profile, classes)


def _simulated(module: Module, profile: Profile, classes: DeviceClasses) -> Simulation:
    domain = _Simulator(module, profile, classes)
    main = module.main
    frame = domain.enter(main, None, [0] * (classes.count * domain.streams), (False,) * len(main.outputs))
    repeated = next((record for record in module.records if isinstance(record, Repeated)), None)
    steps, given = (steps_of(main), list(main.inputs)) if repeated is None else repeated_steps(module, repeated)
    inputs = []
    for item in given:
        handle = Handle(domain.planner.bytes_of(item.value, None), OF_ROLE[item.role], False)
        frame.change(handle, 1)
        inputs.append(handle)
    frame.note_peak([(c, 0) for c in range(classes.count)], None)
    Interpreter(module, domain).run_steps(steps, inputs)
    return Simulation(
        module, profile, classes.of, classes.members, frame.clocks, frame.busy, frame.beside, frame.peaks,
        frame.events, frame.changes, frame.device_ops,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class Handle:
    """The storage of a value, of which several values may be views: its bytes by class, and who may free it.

    `number` is its place among the inputs of the function being simulated, -1 for what the function made. `ready` is
    when what is made on a stream is there, by class.
    """

    bytes: Bytes
    category: int
    freeable: bool
    users: int = 1
    number: int = -1
    ready: dict[int, int] | None = None


@dataclass(slots=True)
class _Frame:
    """A function being simulated, time and memory counted from its start."""

    function: Function
    devices: Devices | None
    gradients: frozenset[str]
    made_on: dict[str, int]
    clocks: list[int]
    classes: int
    works: dict[tuple[int, tuple[bool, ...]], Work]
    live: list[list[int]] = field(init=False)
    total: list[int] = field(init=False)
    peaks: list[Peak] = field(init=False)
    busy: list[list[int]] = field(init=False)
    beside: list[int] = field(init=False)
    events: list[Event | Called] = field(default_factory=list)
    changes: list[Change | Called] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)
    device_ops: int = 0

    def __post_init__(self) -> None:
        n = self.classes
        self.live = [[0] * len(CATEGORIES) for _ in range(n)]
        self.total, self.beside = [0] * n, [0] * n
        self.peaks = [Peak(0, (0,) * len(CATEGORIES), ()) for _ in range(n)]
        self.busy = [[0] * n, [0] * n]

    def change(self, handle: Handle, sign: int) -> None:
        """Storage is taken (1) or given back (-1)."""
        for c, size in handle.bytes:
            self.live[c][handle.category] += sign * size
            self.total[c] += sign * size
            self.changes.append(Change(self.clocks[c], c, sign * size, handle.category))

    def note_peak(self, needed: Sequence[tuple[int, int]], op: Op | None) -> None:
        """Note if more memory is live now than ever before, with what `op` needs on each class while it runs."""
        for c, extra in needed:
            if self.total[c] + extra > self.peaks[c].bytes:
                split = list(self.live[c])
                split[WORKSPACE] += extra
                self.peaks[c] = Peak(self.total[c] + extra, tuple(split), (op,) if op else ())


@dataclass(frozen=True, slots=True)
class _Summary:
    """What a call does, from its start; reused whenever it is entered in the same state.

    `outputs` has, for each output, the number of the input in whose storage it lies, or -1, and otherwise which of
    `made`, the storages that the function made and gives, it is. `moved` are the clocks that it moves, and `freed` the
    inputs whose storage it gives back. `adds` has for each class what it adds to the caller's figures: live bytes by
    category (None where there are none), their sum, busy times.
    """

    frame: _Frame
    outputs: tuple[tuple[int, int], ...]
    made: tuple[Handle, ...]
    moved: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]
    adds: tuple[tuple[int, list[int] | None, int, int, int, int], ...]


@dataclass
class _Simulator(Domain[Handle]):
    module: Module
    profile: Profile
    classes: DeviceClasses
    planner: Planner = field(init=False)
    streams: int = field(init=False)
    frames: list[_Frame] = field(default_factory=list)
    gradients: Gradients = field(init=False)
    tells_lasting: bool = field(init=False)
    """Whether an op on weights or gradients may take another time than on other data."""
    _works: dict[tuple[str, int], dict[tuple[int, tuple[bool, ...]], Work]] = field(default_factory=dict)
    _made_on: dict[str, dict[str, int]] = field(default_factory=dict)
    _summaries: dict[object, _Summary] = field(default_factory=dict)
    _streams_in: dict[str, bool] = field(default_factory=dict)
    _plain: dict[object, _Summary] = field(default_factory=dict)
    """Summaries by the storage that operands have, where no two have the same."""

    def __post_init__(self) -> None:
        names = {str(op.attrs["stream"]) for f in self.module.functions for op in f.ops if "stream" in op.attrs}
        numbers = {name: i + 1 for i, name in enumerate(sorted(names))}
        self.streams = len(numbers) + 1
        changes = any(lookup(op.name, op.location).code.in_place for f in self.module.functions for op in f.ops)
        self.planner = Planner(self.profile, self.classes, numbers, not changes)
        held = [0] * self.classes.count
        for item in self.module.main.inputs:
            if item.role == "parameter":
                for c, size in self.planner.bytes_of(item.value, None):
                    held[c] += size
        # A step goes over the gradients of weights that it updates too, and over as much of other data again.
        lasting = 4 if changes else 2
        if self.profile.cache:
            self.planner.cold = frozenset(c for c, size in enumerate(held) if lasting * size > self.profile.cache)
        self.tells_lasting = self.planner.fixed or bool(self.planner.cold)
        self.gradients = Gradients(self.module)

    def enter(
        self, function: Function, devices: Devices | None, clocks: list[int], outputs: tuple[bool, ...]
    ) -> _Frame:
        """Begin a function on `devices`, None for the entry function."""
        works = self._works.setdefault((function.name, id(devices)), {})
        made_on = self._made_on.get(function.name)
        if made_on is None:
            streams = self.planner.streams
            made_on = self._made_on[function.name] = {
                v.name: streams[str(op.attrs["stream"])]
                for op in function.ops
                if "stream" in op.attrs
                for v in op.results
            }
        gradients = self.gradients.of(function, outputs)
        self.frames.append(_Frame(function, devices, gradients, made_on, clocks, self.classes.count, works))
        return self.frames[-1]

    def apply(self, op: Op, operands: Sequence[Handle]) -> list[Handle]:
        frame = self.frames[-1]
        # What lives through a step is pushed out of a cache by the rest of it.
        lasting: tuple[bool, ...] = ()
        if self.tells_lasting:
            lasting = (*[h.category in LASTING for h in operands], *[v.name in frame.gradients for v in op.results])
        key = (id(op), lasting)
        if (work := frame.works.get(key)) is None:
            work = frame.works[key] = self.planner.plan(op, frame.devices, frame.made_on, lasting)
        results = []
        for value, made in zip(op.results, work.makes, strict=True):
            if made is None:
                operands[0].users += 1
                results.append(operands[0])
                continue
            results.append(Handle(made, GRADIENTS if value.name in frame.gradients else ACTIVATIONS, True))
            frame.change(results[-1], 1)
        if any(work.makes) or any(extra for _, extra in work.workspace):
            frame.note_peak(work.workspace, op)
        clocks = frame.clocks
        busy = frame.beside if work.stream else frame.busy[work.kind]
        for step in work.steps:
            start = max([clocks[c] for c in step.waits])
            for c in step.sets:
                clocks[c] = start + step.duration
            for c in step.classes:
                busy[c] += step.duration - step.held
            frame.events.append(Event(op, step.classes, start, step.duration, work.kind, work.stream))
            if work.stream:
                ready = results[0].ready = results[0].ready or {}
                for c in step.classes:
                    ready[c] = start + step.duration
                    if step.held:
                        frame.events.append(Event(op, (c,), clocks[c], step.held, work.kind, 0))
                        frame.busy[work.kind][c] += step.held
                        clocks[c] += step.held
        for c in work.joins:
            clocks[c] = max(clocks[c], (operands[0].ready or {}).get(c, 0))
        frame.device_ops += work.devices
        return results

    def release(self, value: Value, element: Handle) -> None:
        element.users -= 1
        if element.users == 0 and element.freeable:
            frame = self.frames[-1]
            frame.change(element, -1)
            frame.freed.add(element.number)
            element.freeable = False

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[Handle],
        last: Sequence[bool],
        run: Callable[[Sequence[Handle]], list[Handle]],
    ) -> list[Handle]:
        frame = self.frames[-1]
        devices = self.classes.mapped(op.attrs["devices"], frame.devices)  # type: ignore[arg-type]
        clocks, base = self._relative(frame, devices, self._uses_streams(callee))
        gradients = frame.gradients
        outputs = tuple([v.name in gradients for v in op.results])
        # Nearly all storage is used once, and alike from call to call; most of it is of weights, which nobody frees.
        pairs = zip(operands, last, strict=True)
        plain = tuple([(id(h.bytes), h.category, g, h.users) if h.freeable else h.category for h, g in pairs])
        known = len(set(map(id, operands))) == len(operands)
        key = (callee.name, id(devices), clocks, plain, outputs)
        summary = self._plain.get(key) if known else None
        if summary is None:
            summary = self._summary(callee, devices, clocks, self._shape(operands, last, devices), outputs, run)
            if known:
                self._plain[key] = summary
        return self._take_over(frame, op, summary, operands, base)

    def _shape(
        self, operands: Sequence[Handle], last: Sequence[bool], devices: Devices
    ) -> tuple[tuple[int, int, Bytes | None], ...]:
        """For each operand the first that has its storage, its category, and what of it is the function's to free."""
        # Storage that is used for the last time in this call is.
        ends: dict[int, int] = {}
        for handle, gone in zip(operands, last, strict=True):
            if gone:
                ends[id(handle)] = ends.get(id(handle), 0) + 1
        first: dict[int, int] = {}
        # Only what lies on the devices of the call is freed there; a view may be of more than the operand's type.
        return tuple(
            [
                (
                    first.setdefault(id(h), i),
                    h.category,
                    self.planner.parted(h.bytes, devices)[0] if h.freeable and ends.get(id(h)) == h.users else None,
                )
                for i, h in enumerate(operands)
            ]
        )

    def _uses_streams(self, function: Function) -> bool:
        """Whether a function, or one that it calls, does something on a stream."""
        found = self._streams_in.get(function.name)
        if found is None:
            called = (self.module.function(op.callee) for op in function.ops if op.callee)
            found = any("stream" in op.attrs for op in function.ops) or any(map(self._uses_streams, called))
            self._streams_in[function.name] = found
        return found

    def _relative(self, frame: _Frame, devices: Devices, streams: bool) -> tuple[tuple[int, ...], int]:
        """The clocks of a call's classes, on `streams` as well, from the earliest on; others do not matter."""
        present, count, clocks = self.planner.present(devices), frame.classes, frame.clocks
        base = min([clocks[c] for c in present])
        if not streams:
            return tuple([clocks[c] - base for c in present]), base
        # A stream that is behind its device's own order has nothing left to do.
        found = [max(clocks[place], clocks[c]) - base for c in present for place in range(c, len(clocks), count)]
        return tuple(found), base

    def _summary(
        self,
        callee: Function,
        devices: Devices,
        clocks: tuple[int, ...],
        shape: tuple[tuple[int, int, Bytes | None], ...],
        outputs: tuple[bool, ...],
        run: Callable[[Sequence[Handle]], list[Handle]],
    ) -> _Summary:
        key = (callee.name, id(devices), clocks, shape, outputs)
        summary = self._summaries.get(key)
        if summary is None:
            summary = self._summaries[key] = self._simulate(callee, devices, clocks, shape, outputs, run)
        return summary

    def _simulate(
        self,
        callee: Function,
        devices: Devices,
        clocks: tuple[int, ...],
        shape: Sequence[tuple[int, int, Bytes | None]],
        outputs: tuple[bool, ...],
        run: Callable[[Sequence[Handle]], list[Handle]],
    ) -> _Summary:
        present, count = self.planner.present(devices), self.classes.count
        streams = self.streams if len(clocks) > len(present) else 1
        places = [place for c in present for place in range(c, count * streams, count)]
        began = [0] * (count * self.streams)
        for place, clock in zip(places, clocks, strict=True):
            began[place] = clock
        frame = self.enter(callee, devices, list(began), outputs)
        inside: list[Handle] = []
        for i, (where, category, mine) in enumerate(shape):
            if where != i:
                inside[where].users += 1
                inside.append(inside[where])
            else:
                inside.append(Handle(mine or (), category, mine is not None, number=i))
        given = run(inside)
        self.frames.pop()
        made: dict[int, int] = {}
        lie = tuple((h.number, -1 if h.number >= 0 else made.setdefault(id(h), len(made))) for h in given)
        kept = {id(h): h for h in given if h.number < 0}
        moved = tuple((place, frame.clocks[place]) for place in places if frame.clocks[place] != began[place])
        adds = tuple(
            (c, frame.live[c] if any(frame.live[c]) else None, frame.total[c], frame.beside[c], *busy)
            for c in present
            for busy in [(frame.busy[0][c], frame.busy[1][c])]
        )
        freed = tuple(number for number in frame.freed if number >= 0)
        return _Summary(frame, lie, tuple(kept.values()), moved, freed, adds)

    def _take_over(
        self, frame: _Frame, op: Op, summary: _Summary, operands: Sequence[Handle], base: int
    ) -> list[Handle]:
        """Let the caller go on from where a call leaves it."""
        inner = summary.frame
        called = Called(op, inner.events, inner.changes, base)
        frame.events.append(called)
        frame.changes.append(called)
        for place, clock in summary.moved:
            frame.clocks[place] = base + clock
        compute, communication = frame.busy
        for c, live, total, beside, busy, exchanging in summary.adds:
            peak = inner.peaks[c]
            if frame.total[c] + peak.bytes > frame.peaks[c].bytes:
                split = tuple(a + b for a, b in zip(frame.live[c], peak.split, strict=True))
                frame.peaks[c] = Peak(frame.total[c] + peak.bytes, split, (op, *peak.ops))
            if live is not None:
                frame.live[c] = [a + b for a, b in zip(frame.live[c], live, strict=True)]
                frame.total[c] += total
            frame.beside[c] += beside
            compute[c] += busy
            communication[c] += exchanging
        frame.device_ops += inner.device_ops
        for number in summary.freed:
            handle = operands[number]
            handle.freeable = False
            frame.freed.add(handle.number)
            elsewhere = self.planner.parted(handle.bytes, inner.devices or ())[1]
            if elsewhere:
                frame.change(Handle(elsewhere, handle.category, False), -1)
        made = [Handle(h.bytes, h.category, True, 0) for h in summary.made]
        results = []
        for number, new in summary.outputs:
            handle = operands[number] if number >= 0 else made[new]
            handle.users += 1
            results.append(handle)
        return results
