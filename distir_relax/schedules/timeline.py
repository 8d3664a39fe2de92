"""Timeline of an order: start and end times of tasks, and idle time of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from distir_relax.schedules.activation_memory import peak_activations
from distir_relax.schedules.task import Order, Task
from distir_relax.schedules.task_times import EQUAL, Number, Times
from distir_relax.schedules.validate import dependencies, topological_order


@dataclass(frozen=True)
class Timeline:
    """`starts` and `ends` have the times of each rank's tasks; the earliest start is 0."""

    order: Order
    starts: tuple[tuple[Number, ...], ...]
    ends: tuple[tuple[Number, ...], ...]

    @cached_property
    def makespan(self) -> Number:
        """Return the end of the last task."""
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def work(self) -> tuple[Number, ...]:
        """Return the busy time of each rank."""
        return tuple(
            sum((end - start for start, end in zip(starts, ends, strict=True)), start=0)
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle(self) -> tuple[Number, ...]:
        """Return the idle time of each rank until all have ended: its loss in a single step."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def span_idle(self) -> tuple[Number, ...]:
        """Return the idle time of each rank between its own first task and its last: its loss in each of many steps.

        Ranks that start the next step as soon as they have ended this one lose no more than that (Qi et al., Zero
        Bubble Pipeline Parallelism, 2023, where no rank waits for others between steps).
        """
        rows = zip(self.starts, self.ends, self.work, strict=True)
        return tuple(ends[-1] - starts[0] - work for starts, ends, work in rows)

    @property
    def bubble(self) -> float:
        """Return the idle fraction of all ranks' time until the end: 0 if nothing takes time."""
        return float(sum(self.idle, start=0) / (self.makespan * self.order.ranks)) if self.makespan else 0.0

    @property
    def peak(self) -> tuple[Number, ...]:
        """Return the activation peak of each rank, in stage activations: see `peak_activations`."""
        return peak_activations(self.order)

    def bubbles(self, rank: int) -> tuple[tuple[Number, Number], ...]:
        """Return the idle intervals of a rank, from 0 to the makespan."""
        edges = [0, *self.ends[rank]], [*self.starts[rank], self.makespan]
        return tuple((start, end) for start, end in zip(*edges, strict=True) if end > start)

    def tasks(self) -> Iterator[tuple[Task, Number, Number]]:
        """Yield every task with its start and end, rank by rank."""
        for row, starts, ends in zip(self.order.tasks, self.starts, self.ends, strict=True):
            yield from zip(row, starts, ends, strict=True)


def timeline(order: Order, times: Times = EQUAL) -> Timeline:
    """Return when each task begins and ends, if every rank keeps its order and starts each task as early as possible.

    Results for a stage on another rank take `times.send`, overlapped with the sender's next task; sends do not delay
    each other. Raises `DistIRError` for an invalid order, and for times of another number of stages.
    """
    times.check_shape(order.stages, order.microbatches)
    end_of: dict[Task, Number] = {}
    starts: list[list[Number]] = [[] for _ in order.tasks]
    ends: list[list[Number]] = [[] for _ in order.tasks]
    sequence = topological_order(order)
    existing = {task: None for tasks in order.tasks for task in tasks}
    rank_of, stages = order.rank_of, order.stages
    for rank, position in sequence:
        task = order.tasks[rank][position]
        start: Number = ends[rank][-1] if ends[rank] else 0
        for dependency in dependencies(task, stages, existing):
            ready = end_of[dependency]
            if rank_of[dependency.stage] != rank:
                ready += times.send_time(min(dependency.stage, task.stage), task.microbatch)
            if ready > start:
                start = ready
        end_of[task] = start + times.of(task)
        starts[rank].append(start)
        ends[rank].append(end_of[task])
    return Timeline(order, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
