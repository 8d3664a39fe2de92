"""Scheduling problem: a pipeline with times and memory limits, with tasks as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from distir_relax.errors import DistIRError
from distir_relax.schedules.activation_memory import Memory, stage_sizes
from distir_relax.schedules.task import Kind, Order, Shape, Task
from distir_relax.schedules.task_times import Number, Times

Rows = list[list[int]]
"""For each rank its tasks in order, as numbers."""

_KINDS: tuple[Kind, ...] = ("F", "I", "W")


@dataclass(frozen=True, eq=False)
class Problem:
    """A scheduling problem. Tasks are numbered by kind (forward, input gradients, weight gradients), stage, microbatch.

    With `split` False a backward is one task, numbered as input gradients. Times are multiples of `unit`: integers if
    they were integers or fractions, so that comparisons are exact and fast; likewise sizes.
    """

    shape: Shape
    rank_of: tuple[int, ...]
    times: Times
    memory: Memory | None
    split: bool
    unit: Number = field(init=False)
    durations: list[Number] = field(init=False)
    before: list[int] = field(init=False)
    """The dependency of a task, -1 for none; all its other dependencies precede that one."""
    delays: list[Number] = field(init=False)
    """The delay of the result of that dependency."""
    sizes: list[Number] = field(init=False)
    caps: list[Number] = field(init=False)

    def __post_init__(self) -> None:
        stages, microbatches = self.shape.stages, self.shape.microbatches
        firsts = [self.task(number) for number in range(0, self.count, microbatches)]
        factors = [self.times.factor(m) for m in range(microbatches)]
        durations = [self.times.base(task.kind, task.stage) * factor for task in firsts for factor in factors]
        boundaries = [
            self.times.send_time(s, m) if self.rank_of[s] != self.rank_of[s + 1] else 0
            for s in range(stages - 1)
            for m in range(microbatches)
        ]
        scaled, unit = scale_to_integers([*durations, *boundaries])
        durations, boundaries = scaled[: self.count], scaled[self.count :]
        size = stages * microbatches
        none = [-1] * microbatches
        zero: list[Number] = [0] * microbatches
        weights = size if self.split else 0
        # A forward depends on that of the previous stage, whose number is M less; a backward on that of the next stage,
        # on the last stage on its forward; weight gradients on input gradients.
        backwards = [*range(size + microbatches, 2 * size), *range(size - microbatches, size)]
        self._set("before", [*none, *range(size - microbatches), *backwards, *range(size, size + weights)])
        self._set("delays", zero + boundaries + boundaries + zero + [0] * weights)
        self._set("durations", durations)
        self._set("unit", unit)
        sizes = stage_sizes(stages, self.shape.chunks, self.memory)
        caps = [self.memory.of(rank) if self.memory else math.inf for rank in range(self.shape.ranks)]
        finite = [cap for cap in caps if cap != math.inf]
        scaled, _ = scale_to_integers([*sizes, *finite])
        rest = iter(scaled[stages:])
        self._set("sizes", scaled[:stages])
        self._set("caps", [math.inf if cap == math.inf else next(rest) for cap in caps])

    @property
    def count(self) -> int:
        """Return the number of tasks."""
        return self.shape.stages * self.shape.microbatches * (3 if self.split else 2)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in forward order."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def place(self, number: int) -> tuple[int, int, int]:
        """Return kind (0, 1, 2), stage and microbatch of a task."""
        rest, microbatch = divmod(number, self.shape.microbatches)
        kind, stage = divmod(rest, self.shape.stages)
        return kind, stage, microbatch

    def task(self, number: int) -> Task:
        """Return the task of a number."""
        kind, stage, microbatch = self.place(number)
        return Task(_KINDS[kind] if self.split or kind == 0 else "B", stage, microbatch)

    def order(self, rows: Rows) -> Order:
        """Convert rows of numbers to an order."""
        return Order(tuple(tuple(map(self.task, row)) for row in rows), self.rank_of)

    def rows(self, order: Order) -> Rows:
        """Convert an order to rows of numbers; if backwards are split here, each whole one becomes its halves."""
        kinds: dict[Kind, tuple[int, ...]] = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2) if self.split else (1,)}
        stages, microbatches = self.shape.stages, self.shape.microbatches
        return [
            [(kind * stages + t.stage) * microbatches + t.microbatch for t in tasks for kind in kinds[t.kind]]
            for tasks in order.tasks
        ]

    def fits_in_memory(self, rank: int, row: list[int]) -> bool:
        """Return whether a row stays within the memory limit of its rank."""
        stages, m = self.shape.stages, self.shape.microbatches
        backward, last = stages * m, (2 if self.split else 1) * stages * m
        allocated, cap = total(()), self.caps[rank]
        for task in row:
            if task < backward:
                allocated += self.sizes[task // m]
                if allocated > cap:
                    return False
            elif task >= last:
                allocated -= self.sizes[task // m % stages]
        return True

    def infeasibility(self) -> DistIRError | None:
        """Return an error if a rank cannot store one microbatch, the minimum of any order; None otherwise."""
        for rank, limit in enumerate(self.caps):
            stages = self.stages_of(rank)
            if self.memory and total(self.sizes[stage] for stage in stages) > limit:
                sizes = stage_sizes(self.shape.stages, self.shape.chunks, self.memory)
                needed = total(sizes[stage] for stage in stages)
                cap = self.memory.of(rank)
                message = f"rank {rank} may keep {float(cap):g}, a microbatch takes {float(needed):g} there"
                return DistIRError(message, hint="use smaller microbatches, more ranks, or checkpoints")
        return None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def scale_to_integers(numbers: Sequence[Number]) -> tuple[list[Number], Number]:
    """Return numbers as integer multiples of a unit, and the unit; if any is a float, floats and 1."""
    if any(isinstance(number, float) for number in numbers):
        return [float(number) for number in numbers], 1
    fractions = [Fraction(number) for number in numbers]
    denominator = math.lcm(*(number.denominator for number in fractions))
    unit = Fraction(1, denominator) if denominator > 1 else 1
    return [number.numerator * (denominator // number.denominator) for number in fractions], unit


def total(numbers: Iterable[Number]) -> Number:
    """Return the sum."""
    return sum(numbers, start=0)
