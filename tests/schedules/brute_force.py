"""The shortest makespan there is, by trying all orders: for pipelines of a few tasks."""

from __future__ import annotations

from functools import cache

from distir_relax.schedules import Memory, Shape, Times
from distir_relax.schedules.task import Kind, Task


def shortest(shape: Shape, rank_of: tuple[int, ...], times: Times, memory: Memory, at_most: int) -> int:
    """The makespan of the best order with backwards split, of times that are whole numbers; no more than `at_most`.

    Tasks are begun one after the other in time. Of two ways to the same tasks done, at the same times, one is followed.
    """
    stages, microbatches = shape.stages, shape.microbatches
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    tasks = [Task(kind, s, m) for kind in kinds for s in range(stages) for m in range(microbatches)]
    number = {task: i for i, task in enumerate(tasks)}
    lasts = [int(times.of(task)) for task in tasks]
    ranks = [rank_of[task.stage] for task in tasks]
    needed = [[(number[n], delay) for n, delay in _needs(task, stages, rank_of, times)] for task in tasks]
    sizes = [memory.sizes[task.stage] for task in tasks]
    best = at_most

    @cache
    def visit(ends: tuple[int, ...], now: int, last_rank: int) -> None:
        nonlocal best
        left = [0] * shape.ranks
        free = [0] * shape.ranks
        kept = [memory.of(rank) for rank in range(shape.ranks)]
        for i, end in enumerate(ends):
            if end < 0:
                left[ranks[i]] += lasts[i]
                continue
            free[ranks[i]] = max(free[ranks[i]], end)
            kept[ranks[i]] -= sizes[i] if tasks[i].kind == "F" else -sizes[i] if tasks[i].kind == "W" else 0
        if not any(left):
            best = min(best, max(free))
            return
        if max(max(f, now) + rest for f, rest in zip(free, left, strict=True) if rest) >= best:
            return
        for i, end in enumerate(ends):
            if end >= 0 or any(ends[n] < 0 for n, _ in needed[i]):
                continue
            if tasks[i].kind == "F" and kept[ranks[i]] < sizes[i]:
                continue
            start = max([free[ranks[i]], *(ends[n] + delay for n, delay in needed[i])])
            if (start, ranks[i]) >= (now, last_rank):
                visit((*ends[:i], start + lasts[i], *ends[i + 1 :]), start, ranks[i])

    visit((-1,) * len(tasks), 0, -1)
    return best


def _needs(task: Task, stages: int, rank_of: tuple[int, ...], times: Times) -> list[tuple[Task, int]]:
    s, m = task.stage, task.microbatch

    def sent(boundary: int) -> int:
        return int(times.send_time(boundary, m)) if rank_of[boundary] != rank_of[boundary + 1] else 0

    if task.kind == "F":
        return [(Task("F", s - 1, m), sent(s - 1))] if s else []
    if task.kind == "W":
        return [(Task("I", s, m), 0)]
    behind = [(Task("I", s + 1, m), sent(s))] if s < stages - 1 else []
    return [(Task("F", s, m), 0), *behind]
