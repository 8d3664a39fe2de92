"""When the tasks of an order are done, and how long ranks are idle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from distir_relax.schedules.activation_memory import peak_activations
from distir_relax.schedules.task import Order, Task
from distir_relax.schedules.task_times import EQUAL, Number, Times
from distir_relax.schedules.validate import in_turn, needs


@dataclass(frozen=True)
class Timeline:
    """`starts` and `ends` have for each rank when its tasks begin and end; all begin at 0 at the earliest."""

    order: Order
    starts: tuple[tuple[Number, ...], ...]
    ends: tuple[tuple[Number, ...], ...]

    @cached_property
    def makespan(self) -> Number:
        """When the last task ends."""
        return max(ends[-1] for ends in self.ends)

    @cached_property
    def work(self) -> tuple[Number, ...]:
        """How long each rank is at work."""
        return tuple(
            sum((end - start for start, end in zip(starts, ends, strict=True)), start=0)
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle(self) -> tuple[Number, ...]:
        """How long each rank is idle until all have ended: what a rank waits in a single step."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def span_idle(self) -> tuple[Number, ...]:
        """How long each rank is idle between its own first task and its own last: what is lost in each of many steps.

        Ranks that start the next step as soon as they have ended this one lose no more than that (Qi et al., Zero
        Bubble Pipeline Parallelism, 2023, where no rank waits for others between steps).
        """
        rows = zip(self.starts, self.ends, self.work, strict=True)
        return tuple(ends[-1] - starts[0] - work for starts, ends, work in rows)

    @property
    def bubble(self) -> float:
        """What part of all ranks' time until the end they are idle: 0 where nothing takes time."""
        return float(sum(self.idle, start=0) / (self.makespan * self.order.ranks)) if self.makespan else 0.0

    @property
    def peak(self) -> tuple[Number, ...]:
        """The most that each rank keeps, in stage activations: see `peak_activations`."""
        return peak_activations(self.order)

    def bubbles(self, rank: int) -> tuple[tuple[Number, Number], ...]:
        """When a rank is idle, from 0 to the makespan: the starts and ends."""
        borders = [0, *self.ends[rank]], [*self.starts[rank], self.makespan]
        return tuple((start, end) for start, end in zip(*borders, strict=True) if end > start)

    def tasks(self) -> Iterator[tuple[Task, Number, Number]]:
        """Every task with its start and end, rank by rank."""
        for row, starts, ends in zip(self.order.tasks, self.starts, self.ends, strict=True):
            yield from zip(row, starts, ends, strict=True)


def timeline(order: Order, times: Times = EQUAL) -> Timeline:
    """When each task begins and ends, if every rank keeps its order and begins each task as soon as it can.

    What a task makes for a stage on another rank is on its way for `times.send`, while its rank goes on; sends do not
    hold each other up. Raises `DistIRError` for an order that is not valid, and for times of other numbers of stages.
    """
    times.fit(order.stages, order.microbatches)
    ended: dict[Task, Number] = {}
    starts: list[list[Number]] = [[] for _ in order.tasks]
    ends: list[list[Number]] = [[] for _ in order.tasks]
    turns = in_turn(order)
    existing = {task: None for tasks in order.tasks for task in tasks}
    rank_of, stages = order.rank_of, order.stages
    for rank, position in turns:
        task = order.tasks[rank][position]
        start: Number = ends[rank][-1] if ends[rank] else 0
        for needed in needs(task, stages, existing):
            arrives = ended[needed]
            if rank_of[needed.stage] != rank:
                arrives += times.between(min(needed.stage, task.stage), task.microbatch)
            if arrives > start:
                start = arrives
        ended[task] = start + times.of(task)
        starts[rank].append(start)
        ends[rank].append(ended[task])
    return Timeline(order, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
