"""What orders are compared with: rules and times written down once more, as simply as can be."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from distir_relax.schedules import Order, Task, Times

Edge = tuple[Task, Task, int | float | Fraction]


def edges(order: Order, times: Times) -> Iterator[Edge]:
    """Which task begins when another has ended, and how much later at the earliest."""
    existing = {task for tasks in order.tasks for task in tasks}
    last = order.stages - 1
    for tasks in order.tasks:
        for before, after in pairwise(tasks):
            yield before, after, 0
    for task in existing:
        kind, s, m = task.kind, task.stage, task.microbatch
        if kind == "F":
            if s > 0:
                yield Task("F", s - 1, m), task, sent(order, times, s - 1, m)
        elif kind == "W":
            yield Task("I", s, m), task, 0
        else:
            yield Task("F", s, m), task, 0
            if s < last:
                for whole in {Task("B", s + 1, m), Task("I", s + 1, m)} & existing:
                    yield whole, task, sent(order, times, s, m)


def sent(order: Order, times: Times, stage: int, microbatch: int) -> int | float | Fraction:
    """How long it takes over the boundary behind a stage."""
    return times.send_time(stage, microbatch) if order.rank_of[stage] != order.rank_of[stage + 1] else 0


def starts(order: Order, times: Times) -> dict[Task, int | float | Fraction] | None:
    """When each task begins: all begin at 0, and are moved until nothing is too early. None if that has no end."""
    found: dict[Task, int | float | Fraction] = {task: 0 for tasks in order.tasks for task in tasks}
    all_edges = list(edges(order, times))
    if any(before not in found for before, _, _ in all_edges):
        return None
    for _ in range(len(found) + 1):
        moved = False
        for before, after, wait in all_edges:
            earliest = found[before] + times.of(before) + wait
            if found[after] < earliest:
                found[after], moved = earliest, True
        if not moved:
            return found
    return None


def is_valid(order: Order) -> bool:
    """Whether everything is there once, in its place, and nothing waits for itself."""
    flat = [task for tasks in order.tasks for task in tasks]
    if len(set(flat)) < len(flat) or not flat:
        return False
    if any(order.rank_of[task.stage] != rank for rank, tasks in enumerate(order.tasks) for task in tasks):
        return False
    trained = any(task.kind != "F" for task in flat)
    expected = {("F",), ("F", "B"), ("F", "I", "W")} - ({("F",)} if trained else set())
    for s in range(order.stages):
        for m in range(order.microbatches):
            kinds = {task.kind for task in flat if (task.stage, task.microbatch) == (s, m)}
            if tuple(kind for kind in "FBIW" if kind in kinds) not in expected:
                return False
    return starts(order, Times()) is not None
