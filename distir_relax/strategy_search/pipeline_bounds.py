"""The least time of a pipeline of equal blocks, however they are cut into stages.

A rank of a pipeline with ``n`` blocks computes all microbatches of them. It begins when the first microbatch has passed
the first stages of the ranks before it. In most schedules the last backward of its first stage then goes back through
the same stages; only gradients of weights may be computed later. Both are at most the time of the step. So for a given
time each rank has a largest number of blocks, which is also limited by its memory, and they suffice for the model or
not. Giving each rank in turn as many as it can have is best: a block more on a rank takes at most one from the next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from distir_relax.schedules import Order
from distir_relax.schedules.task import BACKWARDS
from distir_relax.strategies.chain_partition import SLACK

_PRECISION = 1e-4
"""Relative precision of a bound."""


@dataclass(frozen=True, slots=True)
class TaskSeconds:
    """Seconds of some part of a model: its `forward` of the first microbatch, its `backward` of the last to the
    gradients of its inputs, the gradients of its `weights` of one in between, and all tasks of the `first` microbatch,
    of one in the `middle`, and of the `last`."""

    forward: float
    backward: float
    weights: float
    first: float
    middle: float
    last: float

    def less(self, other: TaskSeconds) -> TaskSeconds:
        """Return the seconds without those of another part."""
        return TaskSeconds(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> TaskSeconds:
        """Return the seconds of so many equal parts."""
        return TaskSeconds(*(count * seconds for seconds in astuple(self)))

    def work(self, microbatches: int) -> float:
        """Return the seconds of at least two microbatches."""
        return self.first + (microbatches - 2) * self.middle + self.last


class Kept(NamedTuple):
    """Microbatches that a rank keeps on each of its stages at once, at least: those with a forward whose backward has
    not ended, and those between a backward and the gradients of weights."""

    activations: int
    pending: int


@dataclass(frozen=True, slots=True)
class OrderBounds:
    """What an order of tasks implies for each rank.

    `in_flight` are the microbatches that it keeps on each of its stages at once, at least; `by_one` those that it keeps
    while one of its stages, whichever that is, has gradients, and uses its weights again; `by_all` those while all of
    its stages do. `late` are the gradients of weights after its last backward. Whether ranks begin with their first
    stage (`arrives`), which are the first ones of the model in order, and whether their last backward is that of the
    same stage (`returns`).
    """

    in_flight: tuple[Kept, ...]
    by_one: tuple[Kept, ...]
    by_all: tuple[Kept, ...]
    late: tuple[int, ...]
    arrives: bool
    returns: bool

    @staticmethod
    def of(order: Order) -> OrderBounds:
        """Return the bounds of an order for training; those of any order if a rank has no backward."""
        ends = [max((i for i, t in enumerate(tasks) if t.kind in BACKWARDS), default=-1) for tasks in order.tasks]
        if min(ends, default=-1) < 0:
            return OrderBounds.unknown(order.ranks, len(order.rank_of) // order.ranks)
        firsts = [(tasks[0].kind, tasks[0].stage) for tasks in order.tasks]
        lasts = [tasks[end] for tasks, end in zip(order.tasks, ends, strict=True)]
        memory = [_RankMemory.of(order, rank) for rank in range(order.ranks)]
        return OrderBounds(
            tuple(rank.in_flight() for rank in memory),
            tuple(rank.by_one() for rank in memory),
            tuple(rank.accumulating(range(len(rank.held))) for rank in memory),
            # Of a whole backward, too, the gradients of its weights come last.
            tuple(len(order.tasks[rank]) - 1 - ends[rank] + (t.kind == "B") for rank, t in enumerate(lasts)),
            all(first == ("F", rank) for rank, first in enumerate(firsts)),
            all(last.stage == rank for rank, last in enumerate(lasts)),
        )

    @staticmethod
    def unknown(ranks: int, chunks: int = 1) -> OrderBounds:
        """Return those of any order of at least two microbatches, on so many stages of each rank."""
        # All of one stage may have ended before another one accumulates gradients.
        by_all = (Kept(int(chunks == 1), 0),) * ranks
        return OrderBounds((Kept(1, 0),) * ranks, by_all, by_all, (0,) * ranks, arrives=False, returns=False)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline of `chunks` stages on each rank, and a model of `blocks` to be cut into its stages.

    What the model has beside its blocks takes as long as `rest` of them, without the traffic of data parallelism: so
    stages are cut (`balanced_cuts`).
    """

    bounds: OrderBounds
    microbatches: int
    chunks: int
    blocks: int
    rest: float

    def least_seconds(self, block: TaskSeconds, rest: TaskSeconds, most: Sequence[float]) -> float:
        """Return the least time of a step with at most so many blocks on each rank; infinity if they are too few.

        `rest` is what the model has beside its blocks, on any ranks.
        """
        if not self._suffices(math.inf, block, rest, most):
            return math.inf
        ranks = len(self.bounds.in_flight)
        total = self.blocks * block.work(self.microbatches) + rest.work(self.microbatches)
        low = high = total / ranks
        while not self._suffices(high, block, rest, most):
            low, high = high, 2.0 * high
        while high > low * (1.0 + _PRECISION):
            middle = (low + high) / 2.0
            if self._suffices(middle, block, rest, most):
                high = middle
            else:
                low = middle
        return low

    def _suffices(self, seconds: float, block: TaskSeconds, rest: TaskSeconds, most: Sequence[float]) -> bool:
        """Return whether ranks that have so many seconds can have all of the model."""
        bounds, limit = self.bounds, self._blocks_of_stage()
        work = block.work(self.microbatches)
        before, left, spare = 0, self.blocks, 0.0
        for room, late in zip(most, bounds.late, strict=True):
            count = int(min(left, self.chunks * limit, room))
            if seconds < math.inf:
                count = min(count, int((seconds - before * block.forward) / work))
                if bounds.returns:
                    there_and_back = before * (block.forward + block.backward)
                    count = min(count, int((seconds - there_and_back) / (work - late * block.weights)))
                count = max(count, 0)
            left -= count
            spare += seconds - count * work
            if bounds.arrives:
                before += max(0, count - (self.chunks - 1) * limit)
        return left == 0 and spare >= rest.work(self.microbatches)

    def _blocks_of_stage(self) -> int:
        """Return the most blocks of a stage: `balanced_cuts` makes none slower than the best by more than `SLACK`."""
        share = math.ceil(self.blocks / (len(self.bounds.in_flight) * self.chunks))
        return max(1, math.floor((1.0 + SLACK) * (share + self.rest)))


@dataclass(slots=True)
class _RankMemory:
    """What a rank keeps after each of its tasks, and on each of its stages, which are numbered from 0 on here."""

    kept: list[int]
    """After each task, the microbatches in flight on every stage, at least."""
    held: list[list[tuple[int, int]]]
    """For each stage the numbers of tasks, and the microbatches between a backward and the gradients of weights."""
    first_gradients: list[int]
    """The first task of each stage that gives gradients of weights."""
    last_use: list[int]
    """The last task of each stage that uses weights."""

    @staticmethod
    def of(order: Order, rank: int) -> _RankMemory:
        places = {
            stage: place for place, stage in enumerate(s for s, owner in enumerate(order.rank_of) if owner == rank)
        }
        count = len(places)
        live, pending = [0] * count, [0] * count
        memory = _RankMemory([], [[] for _ in places], [len(order.tasks[rank])] * count, [0] * count)
        for number, task in enumerate(order.tasks[rank]):
            place, kind = places[task.stage], task.kind
            if kind == "F":
                live[place] += 1
            elif kind == "I":
                pending[place] += 1
            else:
                live[place] -= 1
                memory.first_gradients[place] = min(memory.first_gradients[place], number)
                if kind == "W":
                    pending[place] -= 1
            if kind != "W":
                memory.last_use[place] = number
                # A whole backward has its own microbatch between both, for a while.
                memory.held[place].append((number, pending[place] + (kind == "B")))
            memory.kept.append(min(live))
        return memory

    def in_flight(self) -> Kept:
        """Return the most microbatches kept at any time."""
        return Kept(max(self.kept), min(max(n for _, n in held) for held in self.held))

    def accumulating(self, stages: Collection[int]) -> Kept:
        """Return the most microbatches kept while each of some stages has gradients, and uses its weights again.

        `pending` is that of these stages.
        """
        begin = max(self.first_gradients[stage] for stage in stages)
        end = min(self.last_use[stage] for stage in stages)
        pending = (max((n for i, n in self.held[s] if begin < i < end), default=0) for s in stages)
        return Kept(max(self.kept[begin:]), min(pending))

    def by_one(self) -> Kept:
        """Return the most microbatches kept while a stage accumulates, of the stage for which they are fewest."""
        return Kept(*map(min, zip(*(self.accumulating((stage,)) for stage in range(len(self.held))), strict=True)))
