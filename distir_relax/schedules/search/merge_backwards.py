"""Merge split backwards that gain nothing from the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from distir_relax.schedules.search.evaluate import Run, run
from distir_relax.schedules.search.problem import Problem
from distir_relax.schedules.task import Order, Task


def merge_backwards(problem: Problem, schedule: Run) -> Order:
    """Return the order of a run with as many merged backwards as possible at the same makespan.

    Only adjacent halves are merged: gradients are sent when both are done. A whole backward computes both at once, and
    stores nothing in between.
    """
    kind_size = problem.shape.stages * problem.shape.microbatches
    pairs = [
        task
        for row in schedule.rows
        for task, next_task in pairwise(row)
        if kind_size <= task < 2 * kind_size and next_task == task + kind_size
    ]
    merged = set(_mergeable(problem, schedule, [], pairs))
    rows = []
    for row in schedule.rows:
        tasks: list[Task] = []
        for number in row:
            task = problem.task(number)
            if number in merged:
                tasks.append(replace(task, kind="B"))
            elif number - kind_size not in merged:
                tasks.append(task)
        rows.append(tuple(tasks))
    return Order(tuple(rows), problem.rank_of)


def _mergeable(problem: Problem, schedule: Run, accepted: Sequence[int], candidates: Sequence[int]) -> list[int]:
    """Return a subset of `candidates` that can be merged together with `accepted`, by bisection."""
    if not candidates or _keeps_makespan(problem, schedule, [*accepted, *candidates]):
        return [*accepted, *candidates]
    if len(candidates) <= max(1, len(schedule.ends) // 24):
        return list(accepted)
    half = len(candidates) // 2
    return _mergeable(problem, schedule, _mergeable(problem, schedule, accepted, candidates[:half]), candidates[half:])


def _keeps_makespan(problem: Problem, schedule: Run, merged: Sequence[int]) -> bool:
    """Return whether the makespan is kept if these tasks send gradients only after their weight gradients."""
    kind_size, m = problem.shape.stages * problem.shape.microbatches, problem.shape.microbatches
    delays = list(problem.delays)
    for task in merged:
        if task >= kind_size + m:
            delays[task - m] += problem.durations[task + kind_size]
    candidate = run(problem, schedule.rows, delays)
    return candidate is not None and candidate.makespan <= schedule.makespan
