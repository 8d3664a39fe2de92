"""Orders made better by small changes along what takes longest."""

from __future__ import annotations

from collections.abc import Iterator

from distir_relax.schedules.search.evaluate import Run, critical_blocks, run
from distir_relax.schedules.search.problem import Problem, Rows
from distir_relax.schedules.task_times import Number

Move = tuple[int, int, int]
"""In the row of a rank, the task at a position goes to another."""


def improved(problem: Problem, found: Run, enough: Number, effort: int) -> Run:
    """The best of what is reached by moving one task after the other, with up to `effort` tries.

    A chain of tasks without slack makes an order as long as it is; nothing is gained but by taking a task out of one of
    its blocks, or a new first or last into one (Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop
    Problem, 1996). Of those moves the first that makes an order shorter is taken; where none does, the first that keeps
    it as long and leads to an order that was not there yet. Ends at a makespan of `enough`.
    """
    best = found
    seen = {_print(found.rows)}
    while effort > 0 and best.makespan > enough:
        sideways: Run | None = None
        better: Run | None = None
        for move in _moves(problem, found):
            if effort <= 0 or better:
                break
            rows = _moved(problem, found.rows, move)
            if rows is None or _print(rows) in seen:
                continue
            effort -= 1
            tried = run(problem, rows)
            if tried is None:
                continue
            if tried.makespan < found.makespan:
                better = tried
            elif tried.makespan == found.makespan and sideways is None:
                sideways = tried
        following = better or sideways
        if following is None:
            return best
        found = following
        seen.add(_print(found.rows))
        if found.makespan < best.makespan:
            best = found
    return best


def _moves(problem: Problem, found: Run) -> Iterator[Move]:
    """Tasks of critical blocks to their ends: weight gradients out of them first, then what is next to an end."""
    weights = 2 * problem.shape.stages * problem.shape.microbatches
    blocks = critical_blocks(problem, found)
    for rank, first, last in blocks:
        row = found.rows[rank]
        for position in range(first, last):
            if row[position] >= weights:
                yield rank, position, last
    for rank, first, last in blocks:
        if last > first:
            yield rank, last, last - 1
            yield rank, first, first + 1
    for rank, first, last in blocks:
        for position in range(last - 1, first, -1):
            yield rank, last, position - 1
            yield rank, first, position + 1


def _moved(problem: Problem, rows: Rows, move: Move) -> Rows | None:
    """Rows with one task moved; None if it passed what it needs on its rank, or needs it, or what is kept did not fit.

    (Other tasks that wait for each other are seen when the rows are run.)
    """
    rank, start, end = move
    row = list(rows[rank])
    task = row.pop(start)
    each = problem.shape.stages * problem.shape.microbatches
    passed, other = (row[start:end], task + each) if end > start else (row[end:start], task - each)
    if other in passed:
        return None
    row.insert(end, task)
    return [*rows[:rank], row, *rows[rank + 1 :]] if problem.keeps(rank, row) else None


def _print(rows: Rows) -> int:
    """What tells rows from others."""
    return hash(tuple(map(tuple, rows)))
