"""Validate orders: one checker for all schedules."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Kind, Order, Task

Place = tuple[int, int]
"""A rank, and a position in its order."""

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def check(order: Order) -> None:
    """Raise `DistIRError` unless ranks can execute this order to its end without deadlock, and it is complete.

    Every microbatch goes through every stage once, on the rank of that stage: forward, and if there are backward tasks
    at all, backward, by one task ``B`` or by ``I`` and, later, ``W``. A stage's forward depends on that of the previous
    stage, its backward on that of the next stage and on its own forward. The error names the rank, the position in its
    order (from 0) and the task, and what it waits for; a deadlock is reported as a cycle of ranks.
    """
    topological_order(order)


def topological_order(order: Order) -> list[Place]:
    """Return all tasks, by rank and position, in an order that respects dependencies. Raises as `check` does."""
    _check_stages(order)
    places = _check_tasks(order)
    _check_complete(order, places)
    stages = order.stages
    waits = {place: [(d, places[d]) for d in dependencies(task, stages, places)] for task, place in places.items()}
    _check_ranks(order, waits)
    return _walk(order, waits)


def dependencies(task: Task, stages: int, existing: Mapping[Task, object]) -> tuple[Task, ...]:
    """Return the tasks that `task` depends on. `existing` are those of its order: whole or split backwards."""
    stage, microbatch = task.stage, task.microbatch
    forward = Task("F", stage, microbatch)
    if task.kind == "F":
        return (Task("F", stage - 1, microbatch),) if stage else ()
    if task.kind == "W":
        return (Task("I", stage, microbatch),)
    if stage == stages - 1:
        return (forward,)
    next_backward = Task("B", stage + 1, microbatch)
    return forward, next_backward if next_backward in existing else Task("I", stage + 1, microbatch)


def _check_stages(order: Order) -> None:
    if not order.tasks or not order.rank_of:
        raise DistIRError(f"a schedule has ranks and stages, found {order.ranks} ranks and {order.stages} stages")
    for stage, rank in enumerate(order.rank_of):
        if not 0 <= rank < order.ranks:
            raise DistIRError(f"stage {stage} is on rank {rank}, and there are tasks for {order.ranks} ranks")
    for rank in range(order.ranks):
        if rank not in order.rank_of:
            raise DistIRError(f"rank {rank} has no stage", hint="remove the rank, or give it a stage")


def _check_tasks(order: Order) -> dict[Task, Place]:
    """Return the place of each task. Raises for an unknown stage, a wrong rank, or a duplicate."""
    places: dict[Task, Place] = {}
    rank_of = order.rank_of
    for rank, tasks in enumerate(order.tasks):
        for position, task in enumerate(tasks):
            problem = ""
            if task.kind not in _KINDS:
                problem = f"a task is F, B, I or W, found {task.kind!r}"
            elif not 0 <= task.stage < len(rank_of) or task.microbatch < 0:
                problem = f"expected stages from 0 to {order.stages - 1}, microbatches from 0"
            elif rank_of[task.stage] != rank:
                problem = f"stage {task.stage} is on rank {rank_of[task.stage]}"
            elif task in places:
                problem = f"duplicate task, first at {_at(places[task])}"
            if problem:
                raise DistIRError(problem, _where(task, (rank, position)))
            places[task] = (rank, position)
    return places


def _check_complete(order: Order, places: dict[Task, Place]) -> None:
    """Raise for the first microbatch with a missing or extra task on a stage."""
    kinds: dict[tuple[int, int], str] = {}
    for task in places:
        key = task.microbatch, task.stage
        kinds[key] = kinds.get(key, "") + task.kind
    complete = {"FB", "BF", *map("".join, permutations("FIW"))} if order.trains else {"F"}
    # An early exit bounds this loop: there are no more steps than tasks before a missing one.
    for microbatch in range(order.microbatches):
        for stage in range(order.stages):
            if kinds.get((microbatch, stage)) not in complete:
                raise _incomplete(order, places, microbatch, stage)


def _incomplete(order: Order, places: dict[Task, Place], microbatch: int, stage: int) -> DistIRError:
    forward, whole, inputs, weights = (Task(kind, stage, microbatch) for kind in _KINDS)
    if whole in places:
        for half in (inputs, weights):
            if half in places:
                where = _where(half, places[half])
                return DistIRError(f"{whole} at {_at(places[whole])} is the whole backward already", where)
    missing = f"neither {whole} nor {inputs}"
    if forward not in places:
        missing = f"no {forward}"
    elif inputs in places or weights in places:
        missing = f"no {weights if inputs in places else inputs}"
    message = f"there is {missing}, of {order.microbatches} microbatches through {order.stages} stages"
    return DistIRError(message, f"rank {order.rank_of[stage]}")


def _check_ranks(order: Order, waits: dict[Place, list[tuple[Task, Place]]]) -> None:
    """Raise for a task before a dependency on the same rank."""
    for (rank, position), waits_for in waits.items():
        for dependency, (owner, other_position) in waits_for:
            if owner == rank and other_position > position:
                where = _where(order.tasks[rank][position], (rank, position))
                raise DistIRError(f"needs {dependency}, which comes later, at position {other_position}", where)


def _walk(order: Order, waits: dict[Place, list[tuple[Task, Place]]]) -> list[Place]:
    """Advance each rank until it blocks, and again when the task that it waits for is done."""
    progress = [0] * order.ranks
    blocked: dict[Place, list[int]] = {}
    sequence: list[Place] = []
    ready = list(range(order.ranks))
    while ready:
        rank = ready.pop()
        while progress[rank] < len(order.tasks[rank]):
            place = rank, progress[rank]
            blocker = next((other for _, other in waits[place] if other[1] >= progress[other[0]]), None)
            if blocker:
                blocked.setdefault(blocker, []).append(rank)
                break
            sequence.append(place)
            progress[rank] += 1
            ready += blocked.pop(place, [])
    if len(sequence) < sum(map(len, order.tasks)):
        raise _deadlock(order, waits, progress)
    return sequence


def _deadlock(order: Order, waits: dict[Place, list[tuple[Task, Place]]], progress: list[int]) -> DistIRError:
    """Return the error that lists ranks that wait on each other, from one to the next."""
    seen: dict[int, str] = {}
    rank = next(rank for rank, tasks in enumerate(order.tasks) if progress[rank] < len(tasks))
    while rank not in seen:
        position = progress[rank]
        dependency, place = next(item for item in waits[rank, position] if item[1][1] >= progress[item[1][0]])
        task = order.tasks[rank][position]
        seen[rank] = f"\n  {_where(task, (rank, position))} waits for {dependency}, {_at(place)}"
        rank = place[0]
    cycle = list(seen)[list(seen).index(rank) :]
    return DistIRError(f"ranks wait on each other: {''.join(seen[member] for member in cycle)}")


def _where(task: Task, place: Place) -> str:
    return f"{_at(place)}, task {task}"


def _at(place: Place) -> str:
    return f"rank {place[0]}, position {place[1]}"
