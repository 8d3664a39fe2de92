"""By which tasks come first: the policies that the scheduler tries, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from distir_relax.schedules.search.greedy import Policy
from distir_relax.schedules.search.problem import Problem

_By: TypeAlias = Callable[[Problem, int, int], int]


def policies(problem: Problem) -> Iterator[Policy]:
    """Input gradients first, since stages before wait for them, then forwards, then weight gradients; and others."""
    in_turn = list(range(problem.shape.microbatches))
    yield Policy(_keys(problem, "IFW", _microbatches, in_turn))
    # A small microbatch is soon at the last rank, which waits for the first that comes.
    smallest = sorted(in_turn, key=problem.times.factor)
    if smallest != in_turn:
        yield Policy(_keys(problem, "IFW", _microbatches, smallest))
    yield Policy(_keys(problem, "IFW", _rounds, in_turn))
    yield Policy(_keys(problem, "IFW", _depths, in_turn))
    yield Policy(_keys(problem, "FIW", _microbatches, smallest))
    if problem.split:
        yield Policy(_keys(problem, "IFW", _microbatches, in_turn), patient=True)
        yield Policy(_keys(problem, "WIF", _depths, in_turn))
        # Weight gradients give back memory that forwards wait for.
        yield Policy(_keys(problem, "FWI", _microbatches, smallest), patient=True)


def _keys(problem: Problem, kinds: str, by: _By, microbatches: list[int]) -> list[int]:
    """A number for each task: first by kind, then by stage and the place of its microbatch among `microbatches`."""
    stages, m = problem.shape.stages, problem.shape.microbatches
    each, found = stages * m, [0] * problem.count
    for kind in range(problem.count // each):
        first = kinds.index("FIW"[kind]) * 4 * each
        for stage in range(stages):
            # How far a task is from the end: what is about to be done gives back what it keeps.
            left = stages - 1 - stage if kind == 0 else stage
            start = (kind * stages + stage) * m
            for place, microbatch in enumerate(microbatches):
                found[start + microbatch] = first + by(problem, left, place)
    return found


def _microbatches(problem: Problem, left: int, place: int) -> int:
    return place * problem.shape.stages + left


def _depths(problem: Problem, left: int, place: int) -> int:
    return left * problem.shape.microbatches + place


def _rounds(problem: Problem, left: int, place: int) -> int:
    """As interleaved schedules: as many microbatches as ranks through one chunk, then through the next."""
    ranks = problem.shape.ranks
    turn, inside = divmod(place, ranks)
    return turn * problem.shape.stages * ranks + (problem.shape.stages - 1 - left) * ranks + inside
