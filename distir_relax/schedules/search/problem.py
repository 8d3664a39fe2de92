"""What a scheduler works on: a pipeline with its times and memory, tasks as numbers."""

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
"""For each rank its tasks in its order, as numbers."""

_KINDS: tuple[Kind, ...] = ("F", "I", "W")


@dataclass(frozen=True, eq=False)
class Problem:
    """Tasks are numbered by kind (forward, input gradients, weight gradients), then stage, then microbatch.

    With `split` False a backward is one task, numbered as one of input gradients. Times are multiples of `unit`, whole
    numbers if they were whole or fractions, so that they can be compared exactly and soon; sizes likewise.
    """

    shape: Shape
    rank_of: tuple[int, ...]
    times: Times
    memory: Memory | None
    split: bool
    unit: Number = field(init=False)
    durations: list[Number] = field(init=False)
    before: list[int] = field(init=False)
    """The task that a task waits for, -1 for none; that one has waited for all others that it needs."""
    delays: list[Number] = field(init=False)
    """How long it takes from there."""
    sizes: list[Number] = field(init=False)
    caps: list[Number] = field(init=False)

    def __post_init__(self) -> None:
        stages, microbatches = self.shape.stages, self.shape.microbatches
        first = [self.task(number) for number in range(0, self.count, microbatches)]
        factors = [self.times.factor(m) for m in range(microbatches)]
        durations = [self.times.of_whole(task.kind, task.stage) * factor for task in first for factor in factors]
        boundaries = [
            self.times.between(s, m) if self.rank_of[s] != self.rank_of[s + 1] else 0
            for s in range(stages - 1)
            for m in range(microbatches)
        ]
        both, unit = whole_numbers([*durations, *boundaries])
        durations, boundaries = both[: self.count], both[self.count :]
        each = stages * microbatches
        none = [-1] * microbatches
        zero: list[Number] = [0] * microbatches
        weights = each if self.split else 0
        # A forward waits for that of the stage before, whose numbers are M less; a backward for that of the stage
        # behind, on the last stage for its forward; weight gradients for those of inputs.
        back = [*range(each + microbatches, 2 * each), *range(each - microbatches, each)]
        self._set("before", [*none, *range(each - microbatches), *back, *range(each, each + weights)])
        self._set("delays", zero + boundaries + boundaries + zero + [0] * weights)
        self._set("durations", durations)
        self._set("unit", unit)
        sizes = stage_sizes(stages, self.shape.chunks, self.memory)
        caps = [self.memory.of(rank) if self.memory else math.inf for rank in range(self.shape.ranks)]
        finite = [cap for cap in caps if cap != math.inf]
        both, _ = whole_numbers([*sizes, *finite])
        rest = iter(both[stages:])
        self._set("sizes", both[:stages])
        self._set("caps", [math.inf if cap == math.inf else next(rest) for cap in caps])

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return self.shape.stages * self.shape.microbatches * (3 if self.split else 2)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of forwards."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def place(self, number: int) -> tuple[int, int, int]:
        """Kind (0, 1, 2), stage and microbatch of a task."""
        rest, microbatch = divmod(number, self.shape.microbatches)
        kind, stage = divmod(rest, self.shape.stages)
        return kind, stage, microbatch

    def task(self, number: int) -> Task:
        """The task of a number."""
        kind, stage, microbatch = self.place(number)
        return Task(_KINDS[kind] if self.split or kind == 0 else "B", stage, microbatch)

    def order(self, rows: Rows) -> Order:
        """Rows of numbers as an order."""
        return Order(tuple(tuple(map(self.task, row)) for row in rows), self.rank_of)

    def rows(self, order: Order) -> Rows:
        """An order as rows of numbers; where backwards are split here, each whole one becomes its halves."""
        kinds: dict[Kind, tuple[int, ...]] = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2) if self.split else (1,)}
        stages, microbatches = self.shape.stages, self.shape.microbatches
        return [
            [(kind * stages + t.stage) * microbatches + t.microbatch for t in tasks for kind in kinds[t.kind]]
            for tasks in order.tasks
        ]

    def keeps(self, rank: int, row: list[int]) -> bool:
        """Whether what a rank keeps between forwards and backwards fits under its cap if it does its tasks so."""
        stages, m = self.shape.stages, self.shape.microbatches
        backward, last = stages * m, (2 if self.split else 1) * stages * m
        kept, cap = total(()), self.caps[rank]
        for task in row:
            if task < backward:
                kept += self.sizes[task // m]
                if kept > cap:
                    return False
            elif task >= last:
                kept -= self.sizes[task // m % stages]
        return True

    def lack(self) -> DistIRError | None:
        """What to raise where a rank cannot keep one microbatch, the least that any order needs; None where all can."""
        for rank, most in enumerate(self.caps):
            stages = self.stages_of(rank)
            if self.memory and total(self.sizes[stage] for stage in stages) > most:
                given = stage_sizes(self.shape.stages, self.shape.chunks, self.memory)
                needed = total(given[stage] for stage in stages)
                cap = self.memory.of(rank)
                message = f"rank {rank} may keep {float(cap):g}, a microbatch takes {float(needed):g} there"
                return DistIRError(message, hint="make microbatches smaller, or take more ranks, or checkpoints")
        return None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def whole_numbers(numbers: Sequence[Number]) -> tuple[list[Number], Number]:
    """Numbers as whole multiples of a unit, and the unit; where one is a float, as floats, and 1."""
    if any(isinstance(number, float) for number in numbers):
        return [float(number) for number in numbers], 1
    fractions = [Fraction(number) for number in numbers]
    parts = math.lcm(*(number.denominator for number in fractions))
    unit = Fraction(1, parts) if parts > 1 else 1
    return [number.numerator * (parts // number.denominator) for number in fractions], unit


def total(numbers: Iterable[Number]) -> Number:
    """Their sum."""
    return sum(numbers, start=0)
