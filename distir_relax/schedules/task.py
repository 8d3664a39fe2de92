"""What a schedule is: for each rank, its tasks in the order in which it does them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from distir_relax.errors import DistIRError

Kind = Literal["F", "B", "I", "W"]
"""A forward; a whole backward; the gradients of a stage's inputs; those of its weights."""

BACKWARDS = ("B", "I")
"""The kinds that give the gradients of a stage's inputs, which the stage before waits for."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """What a rank does without a pause: one step of one microbatch on one stage.

    `stage` counts the places of the model in the order in which a forward goes through them, over all ranks and chunks;
    `microbatch` counts from 0. A backward is one task ``B``, or two: ``I``, which other stages wait for, and ``W``.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Order:
    """A schedule: `tasks` has for each rank its tasks in its order, `rank_of` the rank of each stage.

    Nothing is checked when it is made: `distir_relax.schedules.validate` does.
    """

    tasks: tuple[tuple[Task, ...], ...]
    rank_of: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.tasks)

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return 1 + max((task.microbatch for tasks in self.tasks for task in tasks), default=-1)

    @property
    def chunks(self) -> int:
        """How many stages a rank has; the most of any, where they differ."""
        return max((self.rank_of.count(rank) for rank in range(self.ranks)), default=0)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backward tasks: an order of forward tasks alone is for inference."""
        return any(task.kind != "F" for tasks in self.tasks for task in tasks)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is two tasks."""
        return any(task.kind in "IW" for tasks in self.tasks for task in tasks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order in which a forward goes through them."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)


@dataclass(frozen=True, slots=True)
class Shape:
    """What an order is made for. Raises `DistIRError` where a number is below 1."""

    ranks: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if min(self.ranks, self.microbatches, self.chunks) < 1:
            found = f"{self.ranks} ranks, {self.microbatches} microbatches, {self.chunks} chunks"
            raise DistIRError(f"a pipeline has at least one rank, one microbatch and one chunk a rank, found {found}")

    @property
    def stages(self) -> int:
        """How many stages the model is cut into: each rank has as many as there are chunks."""
        return self.ranks * self.chunks

    def loop(self) -> tuple[int, ...]:
        """The ranks of stages that go round: 0 1 2 0 1 2."""
        return tuple(stage % self.ranks for stage in range(self.stages))

    def vee(self) -> tuple[int, ...]:
        """The ranks of stages that go there and back: 0 1 2 2 1 0. With more than two chunks, there again."""
        there = tuple(range(self.ranks))
        return tuple(rank for chunk in range(self.chunks) for rank in (there[::-1] if chunk % 2 else there))
