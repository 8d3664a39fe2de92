"""Local search over orders: move tasks along the critical path."""

from __future__ import annotations

from collections.abc import Iterator

from distir_relax.schedules.search.evaluate import Run, critical_blocks, run
from distir_relax.schedules.search.problem import Problem, Rows
from distir_relax.schedules.task_times import Number

Move = tuple[int, int, int]
"""A rank, a position in its row, and the new position of that task."""


def improve(problem: Problem, current: Run, target: Number, effort: int) -> Run:
    """Return the best run reached by moving one task at a time, with up to `effort` evaluations.

    A critical path determines the makespan; only moving a task out of one of its blocks, or a new first or last task
    into one, can shorten it (Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop Problem, 1996). The
    first such move that shortens the order is taken, else the first that keeps its length and leads to a new order.
    Stops at a makespan of `target`.
    """
    best = current
    seen = {_fingerprint(current.rows)}
    while effort > 0 and best.makespan > target:
        sideways: Run | None = None
        shorter: Run | None = None
        for move in _moves(problem, current):
            if effort <= 0 or shorter:
                break
            rows = _apply_move(problem, current.rows, move)
            if rows is None or _fingerprint(rows) in seen:
                continue
            effort -= 1
            candidate = run(problem, rows)
            if candidate is None:
                continue
            if candidate.makespan < current.makespan:
                shorter = candidate
            elif candidate.makespan == current.makespan and sideways is None:
                sideways = candidate
        successor = shorter or sideways
        if successor is None:
            return best
        current = successor
        seen.add(_fingerprint(current.rows))
        if current.makespan < best.makespan:
            best = current
    return best


def _moves(problem: Problem, current: Run) -> Iterator[Move]:
    """Yield moves within critical blocks: weight gradients to the end, then swaps at both ends, then the rest."""
    weights = 2 * problem.shape.stages * problem.shape.microbatches
    blocks = critical_blocks(problem, current)
    for rank, first, last in blocks:
        row = current.rows[rank]
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


def _apply_move(problem: Problem, rows: Rows, move: Move) -> Rows | None:
    """Return rows with one task moved; None if it passes a task related on the rank, or exceeds the memory limit.

    (Dependencies between other tasks are checked by `run`.)
    """
    rank, start, end = move
    row = list(rows[rank])
    task = row.pop(start)
    kind_size = problem.shape.stages * problem.shape.microbatches
    passed, related = (row[start:end], task + kind_size) if end > start else (row[end:start], task - kind_size)
    if related in passed:
        return None
    row.insert(end, task)
    return [*rows[:rank], row, *rows[rank + 1 :]] if problem.fits_in_memory(rank, row) else None


def _fingerprint(rows: Rows) -> int:
    """Return a fingerprint of rows."""
    return hash(tuple(map(tuple, rows)))
