"""A time line as small as a line of text: what each class of devices does most of in each of some columns."""

from __future__ import annotations

from typing import Any

from distir_relax.analysis.simulation import Simulation
from distir_relax.analysis.work import COMPUTE
from distir_relax.report.simulation import class_name
from distir_relax.report.timeline import shown_classes

LANES = 16
"""How many classes of devices have a strip."""


def strips(simulation: Simulation, columns: int = 600) -> list[dict[str, Any]]:
    """For each class of devices its name and `runs`: pairs of what is done most (0 computing, 1 communicating, 2
    nothing) and for how many of the `columns`. What streams do beside is not there."""
    span = max(simulation.clocks) or 1
    shown = shown_classes(simulation, LANES)
    busy = {c: ([0.0] * columns, [0.0] * columns) for c in shown}
    for event, start in simulation.events():
        if event.stream or not event.duration:
            continue
        first, last = start * columns / span, (start + event.duration) * columns / span
        for c in event.classes:
            if c in busy:
                _cover(busy[c][0 if event.kind == COMPUTE else 1], first, last)
    return [{"name": class_name(simulation, c), "runs": _runs(*busy[c])} for c in shown]


def _cover(row: list[float], first: float, last: float) -> None:
    for column in range(int(first), min(int(last) + 1, len(row))):
        row[column] += min(last, column + 1) - max(first, column)


def _runs(compute: list[float], communicate: list[float]) -> list[list[int]]:
    runs: list[list[int]] = []
    for a, b in zip(compute, communicate, strict=True):
        kind = 2 if a + b < 0.5 else 0 if a >= b else 1
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return runs
