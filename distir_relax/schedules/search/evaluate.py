"""How long rows of tasks take, and along which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distir_relax.schedules.search.problem import Problem, Rows
from distir_relax.schedules.task_times import Number


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows of tasks as they run: when each ends, and when the last does."""

    rows: Rows
    ends: list[Number]
    makespan: Number


def run(problem: Problem, rows: Rows, delays: Sequence[Number] | None = None) -> Run | None:
    """Each rank keeps its order and begins each task as soon as it can; None if some never can.

    `delays` may be others than those of the problem. Every task is to be in `rows` once.
    """
    durations, before = problem.durations, problem.before
    delays = delays or problem.delays
    ends: list[Number] = [-1] * problem.count
    free: list[Number] = [0] * len(rows)
    done = [0] * len(rows)
    waiting: dict[int, int] = {}
    ready = list(range(len(rows)))
    left = problem.count
    while ready:
        rank = ready.pop()
        row, position, time = rows[rank], done[rank], free[rank]
        size = len(row)
        while position < size:
            task = row[position]
            needed = before[task]
            if needed >= 0:
                arrives = ends[needed]
                if arrives < 0:
                    waiting[needed] = rank
                    break
                arrives += delays[task]
                if arrives > time:
                    time = arrives
            time += durations[task]
            ends[task] = time
            position += 1
            if task in waiting:
                ready.append(waiting.pop(task))
        left -= position - done[rank]
        done[rank], free[rank] = position, time
    return None if left else Run(rows, ends, max(free))


def critical_blocks(problem: Problem, found: Run) -> list[tuple[int, int, int]]:
    """A longest chain of tasks, as rank, first and last position of those that follow each other without a pause."""
    where = {task: (rank, position) for rank, row in enumerate(found.rows) for position, task in enumerate(row)}
    durations, ends = problem.durations, found.ends
    task = max((row[-1] for row in found.rows), key=lambda last: ends[last])
    blocks = []
    while task >= 0:
        rank, last = where[task]
        first, row = last, found.rows[rank]
        while first and ends[row[first - 1]] == ends[row[first]] - durations[row[first]]:
            first -= 1
        blocks.append((rank, first, last))
        task = problem.before[row[first]]
    return blocks
