"""Simulator state: frames of functions under simulation, and summaries of completed calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distir_relax.ir import Op
from distir_relax.simulation.copies import Copies
from distir_relax.simulation.device_classes import Devices
from distir_relax.simulation.events import WAIT, Called, Change, Event
from distir_relax.simulation.memory_categories import CATEGORIES, WORKSPACE
from distir_relax.simulation.op_timer import Bytes, OpEffect
from distir_relax.simulation.shared_links import InFlight, LinkState, absolute
from distir_relax.simulation.simulation import Peak


@dataclass(slots=True, eq=False)
class Handle:
    """The storage of a value and its views: bytes by class, and whether it may be freed.

    `number` is its index among the inputs of the function under simulation, -1 if the function allocated it. `ready` is
    the completion time by class, if it is computed on a stream.
    """

    bytes: Bytes
    category: int
    freeable: bool
    users: int = 1
    number: int = -1
    ready: dict[int, int] | None = None


@dataclass(slots=True)
class Frame:
    """A function under simulation, with time and memory relative to its start."""

    devices: Devices | None
    gradients: frozenset[str]
    stream_of: Mapping[str, int]
    copies: Copies
    reused: Mapping[str, int]
    clocks: list[int]
    classes: int
    effects: dict[tuple[int, tuple[bool, ...]], OpEffect]
    live: list[list[int]] = field(init=False)
    total: list[int] = field(init=False)
    peaks: list[Peak] = field(init=False)
    busy: list[list[int]] = field(init=False)
    streamed: list[int] = field(init=False)
    hosted: list[int] = field(init=False)
    """The time that each class waits for its host."""
    synchronized: set[int] = field(default_factory=set)
    """The clocks of hosts that have waited for their device."""
    events: list[Event | Called] = field(default_factory=list)
    changes: list[Change | Called] = field(default_factory=list)
    links: dict[int, InFlight] = field(default_factory=dict)
    """Communications in flight on uplinks."""
    freed: set[int] = field(default_factory=set)
    device_ops: int = 0
    hosts: int = 0
    """The number of clocks of hosts, which come last."""
    host_waits: int = 0
    """The number of times that the clock of a host has had an effect."""

    def __post_init__(self) -> None:
        n = self.classes
        self.live = [[0] * len(CATEGORIES) for _ in range(n)]
        self.total, self.streamed, self.hosted = [0] * n, [0] * n, [0] * n
        self.peaks = [Peak(0, (0,) * len(CATEGORIES), ()) for _ in range(n)]
        self.busy = [[0] * n, [0] * n]

    def change(self, bytes_: Bytes, category: int, sign: int) -> None:
        """Allocate (1) or free (-1) storage."""
        for c, size in bytes_:
            self.live[c][category] += sign * size
            self.total[c] += sign * size
            self.changes.append(Change(self.clocks[c], c, sign * size, category))

    def join(self, op: Op, classes: Sequence[int], ready: Mapping[int, int]) -> None:
        """Let classes continue when the operand of the wait `op` is `ready` on them."""
        for c in classes:
            if (time := ready.get(c, 0)) > self.clocks[c]:
                self.clocks[c] = time
                self.events.append(Event(op, (c,), time, 0, WAIT, 0))

    def note_peak(self, needed: Sequence[tuple[int, int]], op: Op | None, note: str = "the inputs") -> None:
        """Update the peak of each class, given the bytes that `op` needs on it while it runs.

        Without an op, `note` is the reason.
        """
        for c, extra in needed:
            if self.total[c] + extra > self.peaks[c].bytes:
                split = list(self.live[c])
                split[WORKSPACE] += extra
                self.peaks[c] = Peak(self.total[c] + extra, tuple(split), (op,) if op else (), note)

    def apply_summary(self, op: Op, summary: Summary, base: int, links: Sequence[int] = ()) -> None:
        """Apply a call's effect on clocks, memory and busy times; it started at `base`, and may use these uplinks."""
        called = Called(op, summary.events, summary.changes, base)
        self.events.append(called)
        self.changes.append(called)
        for index, clock in summary.clocks_after:
            self.clocks[index] = base + clock
        for index, advance in summary.hosts_ahead:
            self.clocks[index] += advance
        if summary.synchronized:
            self.synchronized |= summary.synchronized
        for number, state in summary.links_after:
            self.links[links[number]] = absolute(state, base)
        compute, communication = self.busy
        for c, peak, live, total, streamed, hosted, busy, communicating in summary.class_totals:
            if self.total[c] + peak.bytes > self.peaks[c].bytes:
                split = tuple(a + b for a, b in zip(self.live[c], peak.split, strict=True))
                self.peaks[c] = Peak(self.total[c] + peak.bytes, split, (op, *peak.ops))
            if live is not None:
                self.live[c] = [a + b for a, b in zip(self.live[c], live, strict=True)]
                self.total[c] += total
            self.streamed[c] += streamed
            self.hosted[c] += hosted
            compute[c] += busy
            communication[c] += communicating
        self.device_ops += summary.device_ops


_ClassTotals = tuple[int, Peak, list[int] | None, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Summary:
    """The effect of a call, relative to its start; reused for calls in the same state.

    `outputs` has, for each output, the number of the input whose storage it shares, or -1 and the index of its storage
    in `allocations`, each with bytes and category. `clocks_after` are the clocks that it advances, but those of hosts
    that do not wait: `hosts_ahead` has by how much. `freed` are the inputs whose storage it frees. `class_totals` has
    for each class its peak, and its contribution to the caller's live bytes by category (None if zero), their sum, and
    busy times. `links_after` are the states of the uplinks that it uses, by their position among those of its devices
    (`OpTimer.links_of`).
    """

    devices: Devices
    events: list[Event | Called]
    changes: list[Change | Called]
    device_ops: int
    outputs: tuple[tuple[int, int], ...]
    allocations: tuple[tuple[Bytes, int], ...]
    clocks_after: tuple[tuple[int, int], ...]
    hosts_ahead: tuple[tuple[int, int], ...]
    synchronized: frozenset[int]
    freed: tuple[int, ...]
    class_totals: tuple[_ClassTotals, ...]
    links_after: tuple[tuple[int, LinkState], ...] = ()

    def relocate(self, devices: Devices, classes: Mapping[int, int], count: int, cache: dict[Bytes, Bytes]) -> Summary:
        """Return the summary for equivalent devices: `classes` maps each class to theirs, of `count` classes.

        `cache` has one object for equal bytes.
        """
        allocations = []

        def moved(clock: int) -> int:
            return clock - clock % count + classes[clock % count]

        for bytes_, category in self.allocations:
            relocated = tuple([(classes[c], size) for c, size in bytes_])
            allocations.append((cache.setdefault(relocated, relocated), category))
        relocation = _Relocation(classes)
        return replace(
            self, devices=devices, events=relocation.events(self.events), changes=relocation.changes(self.changes),
            allocations=tuple(allocations),
            clocks_after=tuple([(moved(clock), t) for clock, t in self.clocks_after]),
            hosts_ahead=tuple([(moved(clock), t) for clock, t in self.hosts_ahead]),
            synchronized=frozenset(map(moved, self.synchronized)),
            class_totals=tuple([(classes[totals[0]], *totals[1:]) for totals in self.class_totals]),
        )  # fmt: skip


@dataclass(slots=True)
class _Relocation:
    """Maps events and changes to other classes; those of equal calls stay one object."""

    class_map: Mapping[int, int]
    events_cache: dict[int, list[Event | Called]] = field(default_factory=dict)
    changes_cache: dict[int, list[Change | Called]] = field(default_factory=dict)

    def events(self, events: list[Event | Called]) -> list[Event | Called]:
        result = self.events_cache.get(id(events))
        if result is None:
            result = self.events_cache[id(events)] = [self._event(event) for event in events]
        return result

    def changes(self, changes: list[Change | Called]) -> list[Change | Called]:
        result = self.changes_cache.get(id(changes))
        if result is None:
            result = self.changes_cache[id(changes)] = [self._change(change) for change in changes]
        return result

    def _event(self, event: Event | Called) -> Event | Called:
        if isinstance(event, Called):
            return self._called(event)
        classes = tuple([self.class_map[c] for c in event.classes])
        waits = tuple([self.class_map[c] for c in event.waits])
        return Event(event.op, classes, event.start, event.duration, event.kind, event.stream, waits)

    def _change(self, change: Change | Called) -> Change | Called:
        if isinstance(change, Called):
            return self._called(change)
        return Change(change.time, self.class_map[change.device_class], change.bytes, change.category)

    def _called(self, called: Called) -> Called:
        return Called(called.op, self.events(called.events), self.changes(called.changes), called.base)
