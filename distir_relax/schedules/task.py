"""Tasks of a pipeline, and orders: for each rank its tasks in execution order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from distir_relax.errors import DistIRError

Kind = Literal["F", "B", "I", "W"]
"""A forward; a whole backward; the gradients of a stage's inputs; those of its weights."""

BACKWARDS = ("B", "I")
"""The kinds that compute the gradients of a stage's inputs, on which the previous stage depends."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """An uninterrupted step of a rank: one microbatch on one stage.

    `stage` counts the stages of the model in forward order, over all ranks and chunks; `microbatch` counts from 0. A
    backward is one task ``B``, or two: ``I``, on which other stages depend, and ``W``.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Order:
    """A schedule: `tasks` has the tasks of each rank in order, `rank_of` the rank of each stage.

    The constructor checks nothing: use `distir_relax.schedules.validate`.
    """

    tasks: tuple[tuple[Task, ...], ...]
    rank_of: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.tasks)

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        """Return the number of microbatches."""
        return 1 + max((task.microbatch for tasks in self.tasks for task in tasks), default=-1)

    @property
    def chunks(self) -> int:
        """Return the number of stages per rank; the maximum if they differ."""
        return max((self.rank_of.count(rank) for rank in range(self.ranks)), default=0)

    @cached_property
    def trains(self) -> bool:
        """Return whether there are backward tasks; an order without them is for inference."""
        return any(task.kind != "F" for tasks in self.tasks for task in tasks)

    @cached_property
    def splits(self) -> bool:
        """Return whether some backward is two tasks."""
        return any(task.kind in "IW" for tasks in self.tasks for task in tasks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in forward order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a pipeline. Raises `DistIRError` if a number is below 1."""

    ranks: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.ranks, self.microbatches, self.chunks) < 1:
            found = f"{self.ranks} ranks, {self.microbatches} microbatches, {self.chunks} chunks"
            raise DistIRError(f"a pipeline has at least one rank, one microbatch and one chunk a rank, found {found}")

    @property
    def stages(self) -> int:
        """Return the number of stages: each rank has `chunks`."""
        return self.ranks * self.chunks

    def loop(self) -> tuple[int, ...]:
        """Return the ranks of stages that cycle: 0 1 2 0 1 2."""
        return tuple(stage % self.ranks for stage in range(self.stages))

    def vee(self) -> tuple[int, ...]:
        """Return the ranks of stages in a V: 0 1 2 2 1 0. More than two chunks continue the zigzag."""
        forward = tuple(range(self.ranks))
        return tuple(rank for chunk in range(self.chunks) for rank in (forward[::-1] if chunk % 2 else forward))
