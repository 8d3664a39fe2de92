"""Whether an order is valid: one checker for all schedules, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Kind, Order, Task

Place = tuple[int, int]
"""A rank, and a position in its order."""

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def check(order: Order) -> None:
    """Raise `DistIRError` unless ranks that keep this order get to its end, having done all there is to do.

    Every microbatch goes through every stage once, on the rank of that stage: forward, and if there are backward tasks
    at all, backward, by one task ``B`` or by ``I`` and, later, ``W``. A stage begins its forward after that of the
    stage before, its backward after that of the stage behind and after its own forward. The error names the rank, the
    position in its order (from 0) and the task, and what it waits for; ranks that wait on each other are told in
    turn.
    """
    in_turn(order)


def in_turn(order: Order) -> list[Place]:
    """All tasks, by rank and position, each behind those that it waits for. Raises what `check` does."""
    _check_stages(order)
    places = _check_tasks(order)
    _check_complete(order, places)
    stages = order.stages
    waits = {
        place: [(needed, places[needed]) for needed in needs(task, stages, places)] for task, place in places.items()
    }
    _check_ranks(order, waits)
    return _walk(order, waits)


def needs(task: Task, stages: int, existing: Mapping[Task, object]) -> tuple[Task, ...]:
    """The tasks that `task` waits for. `existing` are those of its order: it says how backwards are done."""
    stage, microbatch = task.stage, task.microbatch
    forward = Task("F", stage, microbatch)
    if task.kind == "F":
        return (Task("F", stage - 1, microbatch),) if stage else ()
    if task.kind == "W":
        return (Task("I", stage, microbatch),)
    if stage == stages - 1:
        return (forward,)
    behind = Task("B", stage + 1, microbatch)
    return forward, behind if behind in existing else Task("I", stage + 1, microbatch)


def _check_stages(order: Order) -> None:
    if not order.tasks or not order.rank_of:
        raise DistIRError(f"a schedule has ranks and stages, found {order.ranks} ranks and {order.stages} stages")
    for stage, rank in enumerate(order.rank_of):
        if not 0 <= rank < order.ranks:
            raise DistIRError(f"stage {stage} is on rank {rank}, and there are tasks for {order.ranks} ranks")
    for rank in range(order.ranks):
        if rank not in order.rank_of:
            raise DistIRError(f"rank {rank} has no stage", hint="leave the rank out, or give it a stage")


def _check_tasks(order: Order) -> dict[Task, Place]:
    """Where each task is done. Raises for one that is of no stage, on the wrong rank, or there twice."""
    places: dict[Task, Place] = {}
    rank_of = order.rank_of
    for rank, tasks in enumerate(order.tasks):
        for position, task in enumerate(tasks):
            wrong = ""
            if task.kind not in _KINDS:
                wrong = f"a task is F, B, I or W, found {task.kind!r}"
            elif not 0 <= task.stage < len(rank_of) or task.microbatch < 0:
                wrong = f"expected stages from 0 to {order.stages - 1}, microbatches from 0"
            elif rank_of[task.stage] != rank:
                wrong = f"stage {task.stage} is on rank {rank_of[task.stage]}"
            elif task in places:
                wrong = f"the task is there twice, first at {_at(places[task])}"
            if wrong:
                raise DistIRError(wrong, _where(task, (rank, position)))
            places[task] = (rank, position)
    return places


def _check_complete(order: Order, places: dict[Task, Place]) -> None:
    """Raises for the first microbatch that lacks a task on a stage, or has one too many."""
    kinds: dict[tuple[int, int], str] = {}
    for task in places:
        at = task.microbatch, task.stage
        kinds[at] = kinds.get(at, "") + task.kind
    complete = {"FB", "BF", *map("".join, permutations("FIW"))} if order.trains else {"F"}
    # Where one is missing it is found soon: there are no more steps than tasks that are there.
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
    found = f"there is {missing}, of {order.microbatches} microbatches through {order.stages} stages"
    return DistIRError(found, f"rank {order.rank_of[stage]}")


def _check_ranks(order: Order, waits: dict[Place, list[tuple[Task, Place]]]) -> None:
    """Raises for a task before one on the same rank that it waits for."""
    for (rank, position), needed in waits.items():
        for other, (owner, later) in needed:
            if owner == rank and later > position:
                where = _where(order.tasks[rank][position], (rank, position))
                raise DistIRError(f"needs {other}, which comes later, at position {later}", where)


def _walk(order: Order, waits: dict[Place, list[tuple[Task, Place]]]) -> list[Place]:
    """Each rank goes on as far as it can, and again when the task that it waits for is done."""
    done = [0] * order.ranks
    waiting: dict[Place, list[int]] = {}
    found: list[Place] = []
    ready = list(range(order.ranks))
    while ready:
        rank = ready.pop()
        while done[rank] < len(order.tasks[rank]):
            here = rank, done[rank]
            missing = next((place for _, place in waits[here] if place[1] >= done[place[0]]), None)
            if missing:
                waiting.setdefault(missing, []).append(rank)
                break
            found.append(here)
            done[rank] += 1
            ready += waiting.pop(here, [])
    if len(found) < sum(map(len, order.tasks)):
        raise _circle(order, waits, done)
    return found


def _circle(order: Order, waits: dict[Place, list[tuple[Task, Place]]], done: list[int]) -> DistIRError:
    """The error that tells ranks that wait on each other, from one to the next."""
    seen: dict[int, str] = {}
    rank = next(rank for rank, tasks in enumerate(order.tasks) if done[rank] < len(tasks))
    while rank not in seen:
        position = done[rank]
        missing, place = next(item for item in waits[rank, position] if item[1][1] >= done[item[1][0]])
        task = order.tasks[rank][position]
        seen[rank] = f"\n  {_where(task, (rank, position))} waits for {missing}, {_at(place)}"
        rank = place[0]
    around = list(seen)[list(seen).index(rank) :]
    return DistIRError(f"ranks wait on each other: {''.join(seen[each] for each in around)}")


def _where(task: Task, place: Place) -> str:
    return f"{_at(place)}, task {task}"


def _at(place: Place) -> str:
    return f"rank {place[0]}, position {place[1]}"
