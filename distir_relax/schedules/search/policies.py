"""Priority policies of the scheduler, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from distir_relax.schedules.search.greedy import Policy
from distir_relax.schedules.search.problem import Problem

_Key: TypeAlias = Callable[[Problem, int, int], int]


def policies(problem: Problem) -> Iterator[Policy]:
    """Yield policies: input gradients first, since earlier stages wait for them, then forwards; and others."""
    ascending = list(range(problem.shape.microbatches))
    yield Policy(_keys(problem, "IFW", _microbatches, ascending))
    # A small microbatch reaches the last rank early, which waits for the first one.
    smallest = sorted(ascending, key=problem.times.factor)
    if smallest != ascending:
        yield Policy(_keys(problem, "IFW", _microbatches, smallest))
    yield Policy(_keys(problem, "IFW", _rounds, ascending))
    yield Policy(_keys(problem, "IFW", _depths, ascending))
    yield Policy(_keys(problem, "FIW", _microbatches, smallest))
    if problem.split:
        yield Policy(_keys(problem, "IFW", _microbatches, ascending), patient=True)
        yield Policy(_keys(problem, "WIF", _depths, ascending))
        # Weight gradients free memory for forwards.
        yield Policy(_keys(problem, "FWI", _microbatches, smallest), patient=True)


def _keys(problem: Problem, kinds: str, key: _Key, microbatches: list[int]) -> list[int]:
    """Return a key for each task: by kind, then by `key`, from its stage and its rank among `microbatches`."""
    stages, m = problem.shape.stages, problem.shape.microbatches
    kind_size, keys = stages * m, [0] * problem.count
    for kind in range(problem.count // kind_size):
        first = kinds.index("FIW"[kind]) * 4 * kind_size
        for stage in range(stages):
            # The distance of a task from the end: tasks near it free their activations.
            distance = stages - 1 - stage if kind == 0 else stage
            start = (kind * stages + stage) * m
            for position, microbatch in enumerate(microbatches):
                keys[start + microbatch] = first + key(problem, distance, position)
    return keys


def _microbatches(problem: Problem, distance: int, position: int) -> int:
    return position * problem.shape.stages + distance


def _depths(problem: Problem, distance: int, position: int) -> int:
    return distance * problem.shape.microbatches + position


def _rounds(problem: Problem, distance: int, position: int) -> int:
    """Return the key of interleaved schedules: as many microbatches as ranks through each chunk in turn."""
    ranks = problem.shape.ranks
    round_, index = divmod(position, ranks)
    return round_ * problem.shape.stages * ranks + (problem.shape.stages - 1 - distance) * ranks + index
