"""The simulator: when each op of a distributed program runs on each device, and what memory is live.

A domain of the abstract interpreter (section 3.3 of the DistIR paper). Devices that do the same are one class, and a
function that is called again in the same state is not simulated again: its clocks, memory and time line are reused.
The state of a call is how far apart the clocks of its devices are, and which operands it uses for the last time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.analysis.copies import Copies, layout_copies
from distir_relax.analysis.device_classes import Devices
from distir_relax.analysis.interpreter import Domain, Interpreter, Step
from distir_relax.analysis.memory_categories import (
    ACTIVATIONS,
    GRADIENTS,
    LASTING,
    OF_ROLE,
    assembled_outputs,
    joined_outputs,
)
from distir_relax.analysis.op_timer import Bytes, Planner, Work
from distir_relax.analysis.simulation import Event, Simulation
from distir_relax.analysis.simulation_plan import Structure, Use
from distir_relax.analysis.simulator_state import Frame, Handle, Summary
from distir_relax.cost.profile import Profile
from distir_relax.errors import ProfileError, VerificationError
from distir_relax.ir import Function, Module, Op, uncollected


def simulate_module(module: Module, profile: Profile, structure: Structure | None = None) -> Simulation:
    """Run a program of the distributed stage on the machine of a profile, without running it.

    `structure` is that of another program for the same profile, where it is known: one that differs in sizes alone, and
    in none that devices have unlike parts of.

    Raises `VerificationError` for a program that is not of that stage or lacks types, `ProfileError` for one that uses
    devices which the machine does not have.
    """
    if module.stage != "distributed":
        raise VerificationError(f"a program of the distributed stage is simulated, found the {module.stage} stage")
    with uncollected():
        structure = structure or Structure(module, profile)
        devices = len(structure.classes.of)
        if devices == 1 and profile.bandwidth_alone:
            profile = replace(profile, bandwidth=profile.bandwidth_alone)
        if devices > profile.devices:
            raise ProfileError(
                f"the program uses {devices} devices, the profile {profile.name} has {profile.devices}",
                hint="give a profile of more devices or nodes",
            )
        return _Simulator(module, profile, structure).run()


COLLECTING = "the outputs, assembled on rank 0"

_State = tuple[tuple[int, int, Bytes | None], ...]
"""For each operand the first that has its storage, its category, and what of it is the function's to free."""


@dataclass(frozen=True, slots=True)
class _Entered:
    """A call, and the state in which it is entered: `run` interprets the callee."""

    callee: Function
    devices: Devices
    clocks: tuple[int, ...]
    state: _State
    outputs: tuple[bool, ...]
    run: Callable[[Sequence[Handle]], list[Handle]]


@dataclass
class _Simulator(Domain[Handle]):
    module: Module
    profile: Profile
    structure: Structure
    planner: Planner = field(init=False)
    streams: int = field(init=False)
    frames: list[Frame] = field(default_factory=list)
    tells_lasting: bool = field(init=False)
    """Whether an op on weights or gradients may take another time than on other data."""
    _works: dict[tuple[str, int], dict[tuple[int, tuple[bool, ...]], Work]] = field(default_factory=dict)
    _copies: dict[str, Copies] = field(default_factory=dict)
    """The copies that strides cause, by function."""
    _summaries: dict[object, Summary] = field(default_factory=dict)
    _alike: dict[object, Summary] = field(default_factory=dict)
    """Summaries by what is the same of all devices on which a call does the same."""
    _plain: dict[object, Summary] = field(default_factory=dict)
    """Summaries of calls of the entry function by the storage of their operands, where no two have the same."""
    _bytes: dict[Bytes, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        structure = self.structure
        self.streams = len(structure.streams) + 1
        self.planner = Planner(self.profile, structure.classes, structure.streams, not structure.changes)
        held = [0] * structure.classes.count
        for item in self.module.main.inputs:
            if item.role == "parameter":
                for c, size in self.planner.bytes_of(item.value, None):
                    held[c] += size
        # A step goes over the gradients of weights that it updates too, and over as much of other data again.
        lasting = 4 if structure.changes else 2
        if self.profile.cache:
            self.planner.cold = frozenset(c for c, size in enumerate(held) if lasting * size > self.profile.cache)
        self.tells_lasting = self.planner.fixed or bool(self.planner.cold)

    def run(self) -> Simulation:
        """Simulate the entry function."""
        main, classes = self.module.main, self.structure.classes
        frame = self.enter(main, None, [0] * (classes.count * self.streams), (False,) * len(main.outputs))
        slots: list[Handle | None] = [None] * self.structure.code.slots
        held: dict[tuple[int, int], int] = defaultdict(int)
        sizes = [(self.planner.bytes_of(item.value, None), OF_ROLE[item.role]) for item in main.inputs]
        for place, number in enumerate(self.structure.entry.inputs):
            mine, category = sizes[number]
            slots[place] = Handle(mine, category, False, 1, place)
            for c, size in mine:
                held[c, category] += size
        for (c, category), size in held.items():
            frame.change(((c, size),), category, 1)
        frame.note_peak([(c, 0) for c in range(classes.count)], None)
        self._run_entry(frame, slots)
        self._collect_outputs(frame)
        return Simulation(
            self.module, self.profile, classes.of, classes.members, frame.clocks, frame.busy, frame.beside,
            frame.peaks, frame.events, frame.changes, frame.device_ops,
        )  # fmt: skip

    def _collect_outputs(self, frame: Frame) -> None:
        """Assemble the outputs on rank 0, where devices share the host's memory; microbatches are joined at last."""
        if self.profile.kind != "cpu":
            return
        mine, sizes = int(self.structure.classes.of[0]), {}
        for record, takes_room in assembled_outputs(self.module):
            sizes[record.output] = record.bytes
            if takes_room:
                frame.change(((mine, record.bytes),), ACTIVATIONS, 1)
                frame.note_peak([(mine, record.buffer)], None, COLLECTING)
        for whole in joined_outputs(self.module):
            frame.change(((mine, sum(sizes.get(name, 0) for name in whole.names)),), ACTIVATIONS, 1)
            frame.note_peak([(mine, 0)], None, COLLECTING)

    def _run_entry(self, frame: Frame, slots: list[Handle | None]) -> None:
        interpreter = Interpreter(self.module, self, self.structure.codes)
        ops = self.structure.entry.ops(self.module.main)
        for op, step, use in zip(ops, self.structure.code.steps, self.structure.uses, strict=True):
            if use is None:
                results = self.apply(op, [slots[i] for i in step.operands])  # type: ignore[misc]
            else:
                results = self._call_of_entry(frame, op, step, use, slots, interpreter)
            for i, result in zip(step.results, results, strict=True):
                slots[i] = result
            for i in step.dead:
                self.release(slots[i])  # type: ignore[arg-type]
                slots[i] = None

    def enter(self, function: Function, devices: Devices | None, clocks: list[int], outputs: tuple[bool, ...]) -> Frame:
        """Begin a function on `devices`, None for the entry function."""
        works = self._works.setdefault((function.name, id(devices)), {})
        gradients, made_on = self.structure.gradients.of(function, outputs), self.structure.made_on(function)
        if function.name not in self._copies:
            self._copies[function.name] = layout_copies(function)
        copies, count = self._copies[function.name], self.structure.classes.count
        self.frames.append(Frame(devices, gradients, made_on, copies, clocks, count, works))
        return self.frames[-1]

    def apply(self, op: Op, operands: Sequence[Handle]) -> list[Handle]:
        frame = self.frames[-1]
        # What lives through a step is pushed out of a cache by the rest of it.
        lasting: tuple[bool, ...] = ()
        if self.tells_lasting:
            lasting = (*[h.category in LASTING for h in operands], *[v.name in frame.gradients for v in op.results])
        key = (id(op), lasting)
        if (work := frame.works.get(key)) is None:
            work = frame.works[key] = self.planner.plan(op, frame.devices, frame.made_on, lasting, frame.copies)
        results = []
        for value, made in zip(op.results, work.makes, strict=True):
            if made is None:
                operands[0].users += 1
                results.append(operands[0])
                continue
            results.append(Handle(made, GRADIENTS if value.name in frame.gradients else ACTIVATIONS, True))
            frame.change(made, results[-1].category, 1)
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

    def release(self, element: Handle) -> None:
        element.users -= 1
        if element.users == 0 and element.freeable:
            frame = self.frames[-1]
            frame.change(element.bytes, element.category, -1)
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
        devices = self._devices(op, frame)
        clocks, base = self._relative(frame, devices, self.structure.uses_streams(callee))
        outputs = tuple([v.name in frame.gradients for v in op.results])
        state = self._state(operands, last, devices)
        summary = self._summary(_Entered(callee, devices, clocks, state, outputs, run))
        return self._go_on(frame, op, summary, operands, range(len(operands)), base)

    def _call_of_entry(
        self,
        frame: Frame,
        op: Op,
        step: Step,
        use: Use,
        slots: Sequence[Handle | None],
        interpreter: Interpreter[Handle],
    ) -> list[Handle]:
        """A call from the entry function: most of its operands are weights, of which nothing changes from one to the
        next, and nearly all other storage is used once, and alike."""
        devices = self._devices(op, frame)
        callee, run = interpreter.enter(step.callee)
        clocks, base = self._relative(frame, devices, self.structure.uses_streams(callee))
        others: list[Handle] = [slots[i] for i in use.others]  # type: ignore[misc]
        pairs = zip(others, use.other_last, strict=True)
        plain = tuple([(id(h.bytes), h.category, g, h.users) if h.freeable else h.category for h, g in pairs])
        is_plain = use.kind >= 0 and len({id(h) for h in others if h.number not in use.inputs}) == len(others)
        key = (use.kind, id(devices), clocks, plain)
        summary = self._plain.get(key) if is_plain else None
        if summary is None:
            operands: list[Handle] = [slots[i] for i in step.operands]  # type: ignore[misc]
            state = self._state(operands, step.last, devices)
            summary = self._summary(_Entered(callee, devices, clocks, state, use.outputs, run))
            if is_plain:
                self._plain[key] = summary
        return self._go_on(frame, op, summary, slots, step.operands, base)

    def _devices(self, op: Op, frame: Frame) -> Devices:
        return self.structure.classes.mapped(op.attrs["devices"], frame.devices)  # type: ignore[arg-type]

    def _state(self, operands: Sequence[Handle], last: Sequence[bool], devices: Devices) -> _State:
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

    def _relative(self, frame: Frame, devices: Devices, streams: bool) -> tuple[tuple[int, ...], int]:
        """The clocks of a call's classes, on `streams` as well, from the earliest on; others do not matter."""
        present, count, clocks = self.planner.present(devices), frame.classes, frame.clocks
        base = min([clocks[c] for c in present])
        if not streams:
            return tuple([clocks[c] - base for c in present]), base
        # A stream that is behind its device's own order has nothing left to do.
        found = [max(clocks[place], clocks[c]) - base for c in present for place in range(c, len(clocks), count)]
        return tuple(found), base

    def _summary(self, call: _Entered) -> Summary:
        key = (call.callee.name, id(call.devices), call.clocks, call.state, call.outputs)
        summary = self._summaries.get(key)
        if summary is None:
            summary = self._summaries[key] = self._on_any(call)
        return summary

    def _on_any(self, call: _Entered) -> Summary:
        """What a call does, from what it does on other devices, if those would do the same."""
        present = self.planner.present(call.devices)
        place = {c: i for i, c in enumerate(present)}
        held = tuple(
            [(i, k, None if b is None else tuple([(place[c], size) for c, size in b])) for i, k, b in call.state]
        )
        cold = tuple([c in self.planner.cold for c in present])
        form = self.structure.form(call.devices, present)
        key = (call.callee.name, form, cold, call.clocks, held, call.outputs)
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = self._simulate(call)
            return found
        to = dict(zip(self.planner.present(found.devices), present, strict=True))
        return found.on(call.devices, to, self.structure.classes.count, self._bytes)

    def _simulate(self, call: _Entered) -> Summary:
        devices, clocks = call.devices, call.clocks
        present, count = self.planner.present(devices), self.structure.classes.count
        streams = self.streams if len(clocks) > len(present) else 1
        places = [place for c in present for place in range(c, count * streams, count)]
        began = [0] * (count * self.streams)
        for place, clock in zip(places, clocks, strict=True):
            began[place] = clock
        frame = self.enter(call.callee, devices, list(began), call.outputs)
        inside: list[Handle] = []
        for i, (where, category, mine) in enumerate(call.state):
            if where != i:
                inside[where].users += 1
                inside.append(inside[where])
            else:
                inside.append(Handle(mine or (), category, mine is not None, number=i))
        given = call.run(inside)
        self.frames.pop()
        made: dict[int, int] = {}
        lie = tuple((h.number, -1 if h.number >= 0 else made.setdefault(id(h), len(made))) for h in given)
        kept = {id(h): (h.bytes, h.category) for h in given if h.number < 0}
        moved = tuple((place, frame.clocks[place]) for place in places if frame.clocks[place] != began[place])
        adds = tuple(
            (c, frame.peaks[c], frame.live[c] if any(frame.live[c]) else None, frame.total[c], frame.beside[c], *busy)
            for c in present
            for busy in [(frame.busy[0][c], frame.busy[1][c])]
        )
        freed = tuple(number for number in frame.freed if number >= 0)
        return Summary(
            devices, frame.events, frame.changes, frame.device_ops, lie, tuple(kept.values()), moved, freed, adds
        )

    def _go_on(
        self, frame: Frame, op: Op, summary: Summary, slots: Sequence[Handle | None], where: Sequence[int], base: int
    ) -> list[Handle]:
        """Let the caller go on from where a call leaves it; operand i of the call is in slot ``where[i]``."""
        frame.take_over(op, summary, base)
        for number in summary.freed:
            handle: Handle = slots[where[number]]  # type: ignore[assignment]
            handle.freeable = False
            frame.freed.add(handle.number)
            elsewhere = self.planner.parted(handle.bytes, summary.devices)[1]
            if elsewhere:
                frame.change(elsewhere, handle.category, -1)
        made = [Handle(held, category, True, 0) for held, category in summary.made]
        results = []
        for number, new in summary.outputs:
            result: Handle = slots[where[number]] if number >= 0 else made[new]  # type: ignore[assignment]
            result.users += 1
            results.append(result)
        return results
