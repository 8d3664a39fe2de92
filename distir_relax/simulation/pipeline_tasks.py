"""Start and end times of pipeline tasks in a simulation, and their spans on each class of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from distir_relax.ir import Op
from distir_relax.simulation.events import WAIT, Called, Event
from distir_relax.simulation.op_timer import COMPUTE, FEMTOSECONDS
from distir_relax.simulation.simulation import Simulation


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
    known: dict[int, dict[int, Span]] = {}
    tasks = []
    for called in simulation.called():
        if called.op.task:
            spans = spans_of(called.events, known).values()
            inner = min((span.start for span in spans), default=0), max((span.end for span in spans), default=0)
            start, end = ((called.base + time) / FEMTOSECONDS for time in inner)
            tasks.append(TaskTime(called.op, first_class(simulation, called), start, end))
    return tasks


def first_class(simulation: Simulation, called: Called) -> int:
    """Return the class of the first device that a call runs on."""
    return int(simulation.class_of[(called.op.devices or (0,))[0]])


class Span(NamedTuple):
    """The extent of timed ops on a class of devices, and the time in which it computes, in femtoseconds."""

    start: int
    end: int
    computed: int


def spans_of(events: list[Event | Called], known: dict[int, dict[int, Span]]) -> dict[int, Span]:
    """Return the span of each device class in the events of a function, without those of streams.

    `known` has those of functions by the identity of their events; the result is added.
    """
    if id(events) in known:
        return known[id(events)]
    found: dict[int, Span] = {}

    def add(device_class: int, span: Span) -> None:
        before = found.get(device_class, span._replace(computed=0))
        found[device_class] = Span(
            min(before.start, span.start), max(before.end, span.end), before.computed + span.computed
        )

    for event in events:
        if isinstance(event, Called):
            for device_class, span in spans_of(event.events, known).items():
                add(device_class, Span(event.base + span.start, event.base + span.end, span.computed))
        elif not event.stream and event.kind != WAIT:
            computed = event.duration if event.kind == COMPUTE else 0
            for device_class in event.classes:
                add(device_class, Span(event.start, event.start + event.duration, computed))
    known[id(events)] = found
    return found
