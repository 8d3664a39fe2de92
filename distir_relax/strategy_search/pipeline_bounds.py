"""The least time of a pipeline of equal blocks, however they are cut into stages.

A rank of a pipeline with ``n`` blocks computes all microbatches of them. It begins when the first microbatch has passed
the first stages of the ranks before it. In most schedules the last backward of its first stage then goes back through
the same stages; only gradients of weights may be computed later. Both are at most the time of the step. So for a given
time each rank has a largest number of blocks, which is also limited by its memory, and they suffice for the model or
not. Giving each rank in turn as many as it can have is best: a block more on a rank takes at most one from the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

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


@dataclass(frozen=True, slots=True)
class OrderBounds:
    """What an order of tasks implies for each rank.

    `in_flight` are the microbatches whose activations it keeps on each of its stages at once, at least; `pending` those
    that each of its stages has at some time between a backward and the gradients of weights, at least; `late` the
    gradients of weights after its last backward. Whether ranks begin with their first stage (`arrives`), which are the
    first ones of the model in order, and whether their last backward is that of the same stage (`returns`).
    """

    in_flight: tuple[int, ...]
    pending: tuple[int, ...]
    late: tuple[int, ...]
    arrives: bool
    returns: bool

    @staticmethod
    def of(order: Order) -> OrderBounds:
        """Return the bounds of an order for training; those of any order if a rank has no backward."""
        ends = [max((i for i, t in enumerate(tasks) if t.kind in BACKWARDS), default=-1) for tasks in order.tasks]
        if min(ends, default=-1) < 0:
            return OrderBounds.unknown(order.ranks)
        firsts = [(tasks[0].kind, tasks[0].stage) for tasks in order.tasks]
        lasts = [tasks[end] for tasks, end in zip(order.tasks, ends, strict=True)]
        return OrderBounds(
            tuple(_in_flight(order, rank) for rank in range(order.ranks)),
            tuple(_pending(order, rank) for rank in range(order.ranks)),
            # Of a whole backward, too, the gradients of its weights come last.
            tuple(len(order.tasks[rank]) - 1 - ends[rank] + (t.kind == "B") for rank, t in enumerate(lasts)),
            all(first == ("F", rank) for rank, first in enumerate(firsts)),
            all(last.stage == rank for rank, last in enumerate(lasts)),
        )

    @staticmethod
    def unknown(ranks: int) -> OrderBounds:
        """Return those of any order."""
        return OrderBounds((1,) * ranks, (0,) * ranks, (0,) * ranks, arrives=False, returns=False)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline of `chunks` stages on each rank, and a model of `blocks` to be cut into its stages."""

    bounds: OrderBounds
    microbatches: int
    chunks: int
    blocks: int

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
        bounds, limit = self.bounds, self._blocks_of_stage(block, rest)
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

    def _blocks_of_stage(self, block: TaskSeconds, rest: TaskSeconds) -> int:
        """Return the most blocks of a stage: `balanced_cuts` makes none slower than the best by more than `SLACK`."""
        share = math.ceil(self.blocks / (len(self.bounds.in_flight) * self.chunks))
        return max(1, math.floor((1.0 + SLACK) * (share + rest.middle / block.middle)))


def _in_flight(order: Order, rank: int) -> int:
    """Return how many microbatches are in flight at once on every stage of a rank, at least."""
    live = Counter({stage: 0 for stage, owner in enumerate(order.rank_of) if owner == rank})
    most = 0
    for task in order.tasks[rank]:
        if task.kind == "F":
            live[task.stage] += 1
            most = max(most, min(live.values(), default=0))
        elif task.kind in ("B", "W"):
            live[task.stage] -= 1
    return most


def _pending(order: Order, rank: int) -> int:
    """Return how many microbatches each stage of a rank has at some time between ``I`` and ``W``, at least."""
    live: Counter[int] = Counter()
    most = {stage: 1 for stage, owner in enumerate(order.rank_of) if owner == rank}
    for task in order.tasks[rank]:
        live[task.stage] += (task.kind == "I") - (task.kind == "W")
        most[task.stage] = max(most.get(task.stage, 1), live[task.stage])
    return min(most.values(), default=0)
