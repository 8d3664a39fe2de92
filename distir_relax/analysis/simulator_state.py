"""What a simulation knows of a function while it runs, and of a call when it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.analysis.copies import Copies
from distir_relax.analysis.device_classes import Devices
from distir_relax.analysis.memory_categories import CATEGORIES, WORKSPACE
from distir_relax.analysis.op_timer import Bytes, Work
from distir_relax.analysis.simulation import Called, Change, Event, Peak
from distir_relax.ir import Op


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
class Frame:
    """A function being simulated, time and memory counted from its start."""

    devices: Devices | None
    gradients: frozenset[str]
    made_on: Mapping[str, int]
    copies: Copies
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

    def change(self, held: Bytes, category: int, sign: int) -> None:
        """Storage is taken (1) or given back (-1)."""
        for c, size in held:
            self.live[c][category] += sign * size
            self.total[c] += sign * size
            self.changes.append(Change(self.clocks[c], c, sign * size, category))

    def note_peak(self, needed: Sequence[tuple[int, int]], op: Op | None, note: str = "the inputs") -> None:
        """Note if more memory is live now than ever before, with what `op` needs on each class while it runs.

        Without an op, `note` names the reason.
        """
        for c, extra in needed:
            if self.total[c] + extra > self.peaks[c].bytes:
                split = list(self.live[c])
                split[WORKSPACE] += extra
                self.peaks[c] = Peak(self.total[c] + extra, tuple(split), (op,) if op else (), note)

    def take_over(self, op: Op, summary: Summary, base: int) -> None:
        """Go on from where a call leaves the clocks, memory and busy times, which began at `base`."""
        called = Called(op, summary.events, summary.changes, base)
        self.events.append(called)
        self.changes.append(called)
        for place, clock in summary.moved:
            self.clocks[place] = base + clock
        compute, communication = self.busy
        for c, peak, live, total, beside, busy, exchanging in summary.adds:
            if self.total[c] + peak.bytes > self.peaks[c].bytes:
                split = tuple(a + b for a, b in zip(self.live[c], peak.split, strict=True))
                self.peaks[c] = Peak(self.total[c] + peak.bytes, split, (op, *peak.ops))
            if live is not None:
                self.live[c] = [a + b for a, b in zip(self.live[c], live, strict=True)]
                self.total[c] += total
            self.beside[c] += beside
            compute[c] += busy
            communication[c] += exchanging
        self.device_ops += summary.device_ops


_Added = tuple[int, Peak, list[int] | None, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a call does, from its start; reused whenever it is entered in the same state.

    `outputs` has, for each output, the number of the input in whose storage it lies, or -1, and otherwise which of
    `made`, the storages that the function made and gives, it is: each its bytes and category. `moved` are the clocks
    that it moves, and `freed` the inputs whose storage it gives back. `adds` has for each class its peak and what it
    adds to the caller's figures: live bytes by category (None where there are none), their sum, busy times.
    """

    devices: Devices
    events: list[Event | Called]
    changes: list[Change | Called]
    device_ops: int
    outputs: tuple[tuple[int, int], ...]
    made: tuple[tuple[Bytes, int], ...]
    moved: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]
    adds: tuple[_Added, ...]

    def on(self, devices: Devices, to: Mapping[int, int], count: int, known: dict[Bytes, Bytes]) -> Summary:
        """The same on other devices, which do the same: `to` leads from each class to theirs, of `count` classes.

        `known` keeps one object for equal bytes.
        """
        made = []
        for held, category in self.made:
            there = tuple([(to[c], size) for c, size in held])
            made.append((known.setdefault(there, there), category))
        renamed = _Renamed(to)
        return replace(
            self, devices=devices, events=renamed.events(self.events), changes=renamed.changes(self.changes),
            made=tuple(made), moved=tuple([(place - place % count + to[place % count], t) for place, t in self.moved]),
            adds=tuple([(to[c], peak, live, t, b, x, y) for c, peak, live, t, b, x, y in self.adds]),
        )  # fmt: skip


@dataclass(slots=True)
class _Renamed:
    """Events and changes on other classes; what calls do that are the same stays one object."""

    to: Mapping[int, int]
    known_events: dict[int, list[Event | Called]] = field(default_factory=dict)
    known_changes: dict[int, list[Change | Called]] = field(default_factory=dict)

    def events(self, events: list[Event | Called]) -> list[Event | Called]:
        found = self.known_events.get(id(events))
        if found is None:
            found = self.known_events[id(events)] = [self._event(event) for event in events]
        return found

    def changes(self, changes: list[Change | Called]) -> list[Change | Called]:
        found = self.known_changes.get(id(changes))
        if found is None:
            found = self.known_changes[id(changes)] = [self._change(change) for change in changes]
        return found

    def _event(self, event: Event | Called) -> Event | Called:
        if isinstance(event, Called):
            return self._called(event)
        classes = tuple([self.to[c] for c in event.classes])
        return Event(event.op, classes, event.start, event.duration, event.kind, event.stream)

    def _change(self, change: Change | Called) -> Change | Called:
        if isinstance(change, Called):
            return self._called(change)
        return Change(change.time, self.to[change.device_class], change.bytes, change.category)

    def _called(self, called: Called) -> Called:
        return Called(called.op, self.events(called.events), self.changes(called.changes), called.base)
