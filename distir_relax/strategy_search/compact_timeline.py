"""A time line as small as a line of text: what each class of devices does most of in each of some columns.

What a call does is joined to a few stretches of computing and communicating, and where it takes less than a column, to
how long it does either: so a strip takes much less time than the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from distir_relax.analysis.class_names import class_name, shown_classes
from distir_relax.analysis.op_timer import COMPUTE
from distir_relax.analysis.simulation import Called, Event, Simulation
from distir_relax.strategy_search.outcome import Lanes

LANES = 16
"""How many classes of devices have a strip."""
COLUMNS = 400


def strips(simulation: Simulation, columns: int = COLUMNS) -> Lanes:
    """The strip of each class of devices, of 16 at equal distances where there are more: its name, and what it does in
    how many columns, one after the other: ``c120m3i40``, in which it computes (c), communicates (m), or does neither
    (i). What streams do beside is not there."""
    rows = {c: ([0.0] * columns, [0.0] * columns) for c in shown_classes(simulation, LANES)}
    _Columns(columns, max(simulation.clocks) or 1, rows).cover(simulation.steps)
    return tuple((class_name(simulation, c), _runs(*row)) for c, row in rows.items())


_Stretch = tuple[int, int, int, int]
"""A class computes (0) or communicates (1) from one time to another, in femtoseconds."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What is done in some steps: the stretches, when the first begins and the last ends, and how long each class
    computes and communicates."""

    stretches: list[_Stretch]
    first: int
    last: int
    busy: list[tuple[int, int, int]]


@dataclass(slots=True)
class _Columns:
    columns: int
    span: int
    rows: dict[int, tuple[list[float], list[float]]]
    """For each class, how much of a column it computes, and communicates."""
    known: dict[int, _Done] = field(default_factory=dict)
    """By the steps of a call, which are one object in all calls that do the same."""

    def cover(self, steps: Sequence[Event | Called]) -> None:
        """Add what the entry function does."""
        columns, span = self.columns, self.span
        for step in steps:
            if not isinstance(step, Called):
                self._add(self._stretches(step), 0)
                continue
            inside = self._done(step.events)
            column = (step.base + inside.first) * columns // span
            if column != (step.base + inside.last) * columns // span:
                self._add(inside.stretches, step.base)
                continue
            for c, *busy in inside.busy:
                for row, duration in zip(self.rows[c], busy, strict=True):
                    row[column] += duration * columns / span

    def _add(self, stretches: Iterable[_Stretch], base: int) -> None:
        columns, span = self.columns, self.span
        for c, kind, start, end in stretches:
            _cover(self.rows[c][kind], (base + start) * columns / span, (base + end) * columns / span)

    def _stretches(self, event: Event) -> Iterator[_Stretch]:
        if event.duration and not event.stream:
            kind, end = int(event.kind != COMPUTE), event.start + event.duration
            yield from ((c, kind, event.start, end) for c in event.classes if c in self.rows)

    def _done(self, steps: Sequence[Event | Called]) -> _Done:
        found = self.known.get(id(steps))
        if found is None:
            found = self.known[id(steps)] = self._joined(steps)
        return found

    def _joined(self, steps: Sequence[Event | Called]) -> _Done:
        """Stretches that follow each other are one: most of what a stage does is to compute."""
        found: list[_Stretch] = []
        going: dict[int, _Stretch] = {}
        busy = {c: [0, 0] for c in self.rows}
        for step in steps:
            if isinstance(step, Called):
                inside = self._done(step.events).stretches
                mine: Iterable[_Stretch] = ((c, kind, a + step.base, b + step.base) for c, kind, a, b in inside)
            else:
                mine = self._stretches(step)
            for c, kind, start, end in mine:
                busy[c][kind] += end - start
                before = going.get(c)
                if before is None or before[1] != kind or before[3] != start:
                    found += [before] if before else []
                    going[c] = c, kind, start, end
                else:
                    going[c] = c, kind, before[2], end
        found += going.values()
        ends = [time for _, _, *times in found for time in times]
        rows = [(c, a, b) for c, (a, b) in busy.items() if a or b]
        return _Done(found, min(ends, default=0), max(ends, default=0), rows)


def _cover(row: list[float], first: float, last: float) -> None:
    for column in range(int(first), min(int(last) + 1, len(row))):
        row[column] += min(last, column + 1) - max(first, column)


def _runs(compute: Sequence[float], communicate: Sequence[float]) -> str:
    runs: list[tuple[str, int]] = []
    for a, b in zip(compute, communicate, strict=True):
        kind = "i" if a + b < 0.5 else "c" if a >= b else "m"
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1] + 1
        else:
            runs.append((kind, 1))
    return "".join(f"{kind}{count}" for kind, count in runs)
