"""Evaluate rows of tasks: makespan and critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distir_relax.schedules.search.problem import Problem, Rows
from distir_relax.schedules.task_times import Number


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows of tasks with the end of each task, and the makespan."""

    rows: Rows
    ends: list[Number]
    makespan: Number


def run(problem: Problem, rows: Rows, delays: Sequence[Number] | None = None) -> Run | None:
    """Run each rank in its order, every task as early as possible; return None on deadlock.

    `delays` replace those of the problem. `rows` must contain every task once.
    """
    durations, before = problem.durations, problem.before
    delays = delays or problem.delays
    ends: list[Number] = [-1] * problem.count
    available: list[Number] = [0] * len(rows)
    progress = [0] * len(rows)
    blocked: dict[int, int] = {}
    ready = list(range(len(rows)))
    remaining = problem.count
    while ready:
        rank = ready.pop()
        row, position, time = rows[rank], progress[rank], available[rank]
        size = len(row)
        while position < size:
            task = row[position]
            dependency = before[task]
            if dependency >= 0:
                ready_at = ends[dependency]
                if ready_at < 0:
                    blocked[dependency] = rank
                    break
                ready_at += delays[task]
                if ready_at > time:
                    time = ready_at
            time += durations[task]
            ends[task] = time
            position += 1
            if task in blocked:
                ready.append(blocked.pop(task))
        remaining -= position - progress[rank]
        progress[rank], available[rank] = position, time
    return None if remaining else Run(rows, ends, max(available))


def critical_blocks(problem: Problem, result: Run) -> list[tuple[int, int, int]]:
    """Return a critical path, as rank, first and last position of consecutive tasks without a pause."""
    places = {task: (rank, position) for rank, row in enumerate(result.rows) for position, task in enumerate(row)}
    durations, ends = problem.durations, result.ends
    task = max((row[-1] for row in result.rows), key=lambda last: ends[last])
    blocks = []
    while task >= 0:
        rank, last = places[task]
        first, row = last, result.rows[rank]
        while first and ends[row[first - 1]] == ends[row[first]] - durations[row[first]]:
            first -= 1
        blocks.append((rank, first, last))
        task = problem.before[row[first]]
    return blocks
