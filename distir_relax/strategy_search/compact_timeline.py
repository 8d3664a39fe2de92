"""Compact timeline: one line of text for each device class, with its main activity in each of some columns.

A call is reduced to a few intervals of compute and communication or, if it is shorter than a column, to the duration of
both; so a timeline takes much less time than the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from distir_relax.simulation.class_names import class_name, shown_classes
from distir_relax.simulation.events import Called, Event
from distir_relax.simulation.op_timer import COMPUTE
from distir_relax.simulation.simulation import Simulation
from distir_relax.strategy_search.outcome import Lanes

LANES = 16
"""Maximum number of device classes with a line."""
COLUMNS = 400


def compact_timeline(simulation: Simulation, columns: int = COLUMNS) -> Lanes:
    """Return the name and the line of each device class, of at most 16 at equal distances.

    A line has run lengths of columns: ``c120m3i40``, in which the class computes (c), communicates (m), or idles (i).
    Overlapped work on streams is not included.
    """
    rows = {c: ([0.0] * columns, [0.0] * columns) for c in shown_classes(simulation, LANES)}
    _Columns(columns, max(simulation.clocks) or 1, rows).add_steps(simulation.steps)
    return tuple((class_name(simulation, c), _run_lengths(*row)) for c, row in rows.items())


_Interval = tuple[int, int, int, int]
"""A device class computes (0) or communicates (1) from one time to another, in femtoseconds."""


@dataclass(frozen=True, slots=True)
class _Activity:
    """The intervals of some steps, the first start, the last end, and compute and communication time by class."""

    intervals: list[_Interval]
    first: int
    last: int
    busy: list[tuple[int, int, int]]


@dataclass(slots=True)
class _Columns:
    columns: int
    span: int
    rows: dict[int, tuple[list[float], list[float]]]
    """By class: the compute and the communication of each column."""
    cache: dict[int, _Activity] = field(default_factory=dict)
    """By the steps of a call, which are one object for all equal calls."""

    def add_steps(self, steps: Sequence[Event | Called]) -> None:
        """Add the steps of the entry function."""
        columns, span = self.columns, self.span
        for step in steps:
            if not isinstance(step, Called):
                self._add(self._event_intervals(step), 0)
                continue
            activity = self._activity(step.events)
            column = (step.base + activity.first) * columns // span
            if column != (step.base + activity.last) * columns // span:
                self._add(activity.intervals, step.base)
                continue
            for c, *busy in activity.busy:
                for row, duration in zip(self.rows[c], busy, strict=True):
                    row[column] += duration * columns / span

    def _add(self, intervals: Iterable[_Interval], base: int) -> None:
        columns, span = self.columns, self.span
        for c, kind, start, end in intervals:
            _add_interval(self.rows[c][kind], (base + start) * columns / span, (base + end) * columns / span)

    def _event_intervals(self, event: Event) -> Iterator[_Interval]:
        if event.duration and not event.stream:
            kind, end = int(event.kind != COMPUTE), event.start + event.duration
            yield from ((c, kind, event.start, end) for c in event.classes if c in self.rows)

    def _activity(self, steps: Sequence[Event | Called]) -> _Activity:
        activity = self.cache.get(id(steps))
        if activity is None:
            activity = self.cache[id(steps)] = self._merge_intervals(steps)
        return activity

    def _merge_intervals(self, steps: Sequence[Event | Called]) -> _Activity:
        """Merge consecutive intervals of one kind; most of a stage is compute."""
        intervals: list[_Interval] = []
        current: dict[int, _Interval] = {}
        busy = {c: [0, 0] for c in self.rows}
        for step in steps:
            if isinstance(step, Called):
                callee = self._activity(step.events).intervals
                new: Iterable[_Interval] = ((c, kind, a + step.base, b + step.base) for c, kind, a, b in callee)
            else:
                new = self._event_intervals(step)
            for c, kind, start, end in new:
                busy[c][kind] += end - start
                previous = current.get(c)
                if previous is None or previous[1] != kind or previous[3] != start:
                    intervals += [previous] if previous else []
                    current[c] = c, kind, start, end
                else:
                    current[c] = c, kind, previous[2], end
        intervals += current.values()
        ends = [time for _, _, *times in intervals for time in times]
        rows = [(c, a, b) for c, (a, b) in busy.items() if a or b]
        return _Activity(intervals, min(ends, default=0), max(ends, default=0), rows)


def _add_interval(row: list[float], first: float, last: float) -> None:
    for column in range(int(first), min(int(last) + 1, len(row))):
        row[column] += min(last, column + 1) - max(first, column)


def _run_lengths(compute: Sequence[float], communicate: Sequence[float]) -> str:
    runs: list[tuple[str, int]] = []
    for a, b in zip(compute, communicate, strict=True):
        kind = "i" if a + b < 0.5 else "c" if a >= b else "m"
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1] + 1
        else:
            runs.append((kind, 1))
    return "".join(f"{kind}{count}" for kind, count in runs)
