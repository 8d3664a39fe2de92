"""Critical path of a simulation: the chain of events that determines its makespan.

An event starts when the last of the clocks that it waits for is reached: the order of ops of its classes and, on a
stream, the order of the stream. The clock of a class is that of its last event in order, or of an event on a stream
that a `wait` has joined. So in program order, for each clock, the event that reached it last is known, and that of the
latest clock precedes the event on its path. Walking back from the last event, starts and ends meet: the durations add
up to the makespan, to the femtosecond. If an event starts later than all of these clocks, the host had not started it
yet: the rest is time of the host.

A stream's clock that is behind its device's own when a function is called is moved up to it (see
`simulator._relative`), so within a call the device's clock at its start counts for the stream, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.ir import Op
from distir_relax.simulation.events import WAIT, Called, Event
from distir_relax.simulation.op_timer import COMMUNICATION, COMPUTE, FEMTOSECONDS
from distir_relax.simulation.simulation import Simulation

HOST = 3
"""The kind of a step in which the devices wait for the host."""

KIND_NAMES = {COMPUTE: "compute", COMMUNICATION: "communication", HOST: "host"}


@dataclass(frozen=True, slots=True)
class PathStep:
    """An event on the critical path, or the time before it in which its devices wait for the host (kind `HOST`).

    Times are in femtoseconds. `op` is None for time of the host after the last event. `calls` are the calls that lead
    to the op, from the entry function on. `device_class` is the class whose order the next step waits for, one of the
    `classes` of the event.
    """

    op: Op | None
    calls: tuple[Op, ...]
    device_class: int
    classes: tuple[int, ...]
    stream: int
    kind: int
    start: int
    duration: int

    @property
    def end(self) -> int:
        """The time at which the step ends."""
        return self.start + self.duration

    @property
    def location(self) -> str:
        """The line of the user's model, or an empty text if the op has none."""
        return self.op.location if self.op is not None else ""

    @property
    def name(self) -> str:
        """The op, or ``host``."""
        return "host" if self.kind == HOST or self.op is None else self.op.name


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The steps that determine the makespan, in order of time; each starts when the one before it ends."""

    steps: tuple[PathStep, ...]

    @property
    def makespan(self) -> int:
        """The sum of all durations, in femtoseconds."""
        return sum(step.duration for step in self.steps)

    def of_kind(self, kind: int) -> int:
        """The femtoseconds of the steps of a kind."""
        return sum(step.duration for step in self.steps if step.kind == kind)

    @property
    def seconds(self) -> float:
        """The makespan in seconds."""
        return self.makespan / FEMTOSECONDS


def critical_path(simulation: Simulation) -> CriticalPath:
    """Return the critical path of a simulation; it is empty if nothing takes time."""
    walk = _Walk(len(simulation.members))
    walk.add(simulation.steps)
    return CriticalPath(tuple(reversed(list(walk.steps_back(max(simulation.clocks, default=0))))))


_Reached = tuple[int, int]
"""The time at which a clock was reached, and the number of the event that reached it, -1 for the beginning."""
_BEGINNING: _Reached = (0, -1)


@dataclass(frozen=True, slots=True)
class _Node:
    event: Event
    start: int
    calls: tuple[Op, ...]
    before: _Reached
    via: int
    """The class whose clock the event waited for."""


@dataclass
class _Walk:
    """Finds the predecessor of each event, in program order."""

    classes: int
    nodes: list[_Node] = field(default_factory=list)
    own: list[_Reached] = field(init=False)
    """For each class, its place in its order of ops."""
    streams: dict[tuple[int, int], _Reached] = field(default_factory=dict)
    """For each class and stream, its place in the order of the stream."""
    pending: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """Events on streams by call, class and end."""
    frames: int = 0
    _with_streams: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = [_BEGINNING] * self.classes

    def add(
        self,
        events: Sequence[Event | Called],
        base: int = 0,
        calls: tuple[Op, ...] = (),
        at_call: Sequence[_Reached] | None = None,
    ) -> None:
        """Add the events of a function; `at_call` has the classes' own places when it was called."""
        self.frames += 1
        frame = self.frames
        for event in events:
            if isinstance(event, Called):
                has_streams = self._uses_streams(event.events)
                self.add(event.events, base + event.base, (*calls, event.op), list(self.own) if has_streams else None)
            elif event.kind == WAIT:
                self._join(event, base + event.start, frame)
            else:
                self._add_event(event, base + event.start, calls, at_call, frame)

    def _add_event(
        self,
        event: Event,
        start: int,
        calls: tuple[Op, ...],
        at_call: Sequence[_Reached] | None,
        frame: int,
    ) -> None:
        before, via = _BEGINNING, event.classes[0]
        for c in event.waits or event.classes:
            if self.own[c] > before:
                before, via = self.own[c], c
        if event.stream:
            for c in event.classes:
                place = self.streams.get((c, event.stream), _BEGINNING)
                if at_call is not None:
                    place = max(place, at_call[c])
                if place[0] > before[0]:
                    before, via = place, c
        number, end = len(self.nodes), start + event.duration
        self.nodes.append(_Node(event, start, calls, before, via))
        for c in event.classes:
            if event.stream:
                self.streams[c, event.stream] = (end, number)
                self.pending.setdefault((frame, c, end), []).append(number)
            else:
                self.own[c] = (end, number)

    def _join(self, wait: Event, time: int, frame: int) -> None:
        """Let a class continue after the event on a stream that it has waited for."""
        (c,), value = wait.classes, wait.op.operands[0].name
        ended = self.pending[frame, c, time]
        # An op on a stream that overwrites its operand is waited for under the names of both.
        named = [n for n in ended if value in {result.name for result in self.nodes[n].event.op.results}]
        self.own[c] = (time, (named or ended)[-1])

    def steps_back(self, makespan: int) -> list[PathStep]:
        """Return the steps of the path, the last one first."""
        last = max(range(len(self.nodes)), key=lambda n: self.nodes[n].start + self.nodes[n].event.duration, default=-1)
        steps: list[PathStep] = []
        end, number = makespan, last
        via = self.nodes[last].event.classes[0] if self.nodes else 0
        if makespan and (not self.nodes or self._end(last) < makespan):
            begin = self._end(last) if self.nodes else 0
            steps.append(PathStep(None, (), via, (via,), 0, HOST, begin, end - begin))
        while number >= 0:
            node = self.nodes[number]
            event = node.event
            if event.duration:
                steps.append(
                    PathStep(
                        event.op, node.calls, via, event.classes, event.stream, event.kind, node.start, event.duration
                    )
                )
            (reached, number), via = node.before, node.via
            if reached < node.start:
                steps.append(PathStep(event.op, node.calls, via, event.classes, 0, HOST, reached, node.start - reached))
        return steps

    def _end(self, number: int) -> int:
        return self.nodes[number].start + self.nodes[number].event.duration

    def _uses_streams(self, events: Sequence[Event | Called]) -> bool:
        # Equal calls share their events.
        result = self._with_streams.get(id(events))
        if result is None:
            result = any(
                self._uses_streams(event.events) if isinstance(event, Called) else bool(event.stream)
                for event in events
            )
            self._with_streams[id(events)] = result
        return result
