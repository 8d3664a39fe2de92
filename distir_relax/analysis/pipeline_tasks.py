"""Start and end times of pipeline tasks in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.analysis.events import WAIT, Called, Event
from distir_relax.analysis.op_timer import FEMTOSECONDS
from distir_relax.analysis.simulation import Simulation
from distir_relax.ir import Op


@dataclass(frozen=True, slots=True)
class TaskTime:
    """A task: its call, its device class, and its start and end in seconds from the beginning."""

    op: Op
    device_class: int
    start: float
    end: float

    @property
    def name(self) -> str:
        """``1F0``: the forward of microbatch 0 on stage 1."""
        return self.op.task_name


def task_times(simulation: Simulation) -> list[TaskTime]:
    """Return the tasks of a simulated program, in program order; a task without timed ops has no duration.

    A task on several device classes starts with the first of them and ends with the last.
    """
    extents: dict[int, tuple[int, int] | None] = {}

    def extent(events: list[Event | Called]) -> tuple[int, int] | None:
        if id(events) not in extents:
            timed = [e for e in events if isinstance(e, Event) and not e.stream and e.kind != WAIT]
            intervals = [(e.start, e.start + e.duration) for e in timed]
            for called in (e for e in events if isinstance(e, Called)):
                inner = extent(called.events)
                if inner is not None:
                    intervals.append((called.base + inner[0], called.base + inner[1]))
            extents[id(events)] = (min(a for a, _ in intervals), max(b for _, b in intervals)) if intervals else None
        return extents[id(events)]

    tasks = []
    for called in simulation.called():
        if called.op.task:
            inner = extent(called.events) or (0, 0)
            first = int(simulation.class_of[(called.op.devices or (0,))[0]])
            start, end = ((called.base + time) / FEMTOSECONDS for time in inner)
            tasks.append(TaskTime(called.op, first, start, end))
    return tasks
