"""Halves of backwards made whole again, where that costs no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from distir_relax.schedules.search.evaluate import Run, run
from distir_relax.schedules.search.problem import Problem
from distir_relax.schedules.task import Order, Task


def with_whole_backwards(problem: Problem, found: Run) -> Order:
    """The order of a run in which as many backwards as can be are one task again, and which takes no longer.

    Only halves that stand side by side are joined: gradients are sent on when both are done. A whole backward computes
    at once what two tasks would compute apart, and keeps nothing in between.
    """
    each = problem.shape.stages * problem.shape.microbatches
    pairs = [
        task
        for row in found.rows
        for task, following in pairwise(row)
        if each <= task < 2 * each and following == task + each
    ]
    joined = set(_joined(problem, found, [], pairs))
    rows = []
    for row in found.rows:
        tasks: list[Task] = []
        for number in row:
            task = problem.task(number)
            if number in joined:
                tasks.append(replace(task, kind="B"))
            elif number - each not in joined:
                tasks.append(task)
        rows.append(tuple(tasks))
    return Order(tuple(rows), problem.rank_of)


def _joined(problem: Problem, found: Run, certain: Sequence[int], tried: Sequence[int]) -> list[int]:
    """Of those that are tried a part that can be joined beside those that are certain: all, or of each half a part."""
    if not tried or _keeps(problem, found, [*certain, *tried]):
        return [*certain, *tried]
    if len(tried) <= max(1, len(found.ends) // 24):
        return list(certain)
    half = len(tried) // 2
    return _joined(problem, found, _joined(problem, found, certain, tried[:half]), tried[half:])


def _keeps(problem: Problem, found: Run, joined: Sequence[int]) -> bool:
    """Whether the run is as short if the gradients of these tasks are sent on behind their weights' only."""
    each, m = problem.shape.stages * problem.shape.microbatches, problem.shape.microbatches
    delays = list(problem.delays)
    for task in joined:
        if task >= each + m:
            delays[task - m] += problem.durations[task + each]
    tried = run(problem, found.rows, delays)
    return tried is not None and tried.makespan <= found.makespan
