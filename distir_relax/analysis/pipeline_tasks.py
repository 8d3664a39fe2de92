"""When the tasks of a pipeline begin and end in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.analysis.op_timer import FEMTOSECONDS
from distir_relax.analysis.simulation import Called, Event, Simulation
from distir_relax.ir import Op


@dataclass(frozen=True, slots=True)
class TaskTime:
    """A call of a stage: on which class of devices, and from when to when, in seconds from the beginning."""

    op: Op
    device_class: int
    start: float
    end: float

    @property
    def name(self) -> str:
        """``1F0``: the forward of microbatch 0 on stage 1."""
        return self.op.task_name


def task_times(simulation: Simulation) -> list[TaskTime]:
    """The tasks of a simulated program, in program order; one of which nothing takes time has no length.

    A task on several classes of devices begins with the first of them and ends with the last.
    """
    extents: dict[int, tuple[int, int] | None] = {}

    def extent(events: list[Event | Called]) -> tuple[int, int] | None:
        if id(events) not in extents:
            found = [(e.start, e.start + e.duration) for e in events if isinstance(e, Event) and not e.stream]
            for called in (e for e in events if isinstance(e, Called)):
                inner = extent(called.events)
                if inner is not None:
                    found.append((called.base + inner[0], called.base + inner[1]))
            extents[id(events)] = (min(a for a, _ in found), max(b for _, b in found)) if found else None
        return extents[id(events)]

    tasks = []
    for called in simulation.called():
        if called.op.task:
            inner = extent(called.events) or (0, 0)
            first = int(simulation.class_of[(called.op.devices or (0,))[0]])
            start, end = ((called.base + time) / FEMTOSECONDS for time in inner)
            tasks.append(TaskTime(called.op, first, start, end))
    return tasks
