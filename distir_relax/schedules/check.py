"""Whether an order is valid: one checker for all schedules, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Order, Task

Place = tuple[int, int]
"""A rank, and a position in its order."""


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
    waits = {
        place: [(needed, places[needed]) for needed in needs(task, order.stages, places)]
        for task, place in places.items()
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
    for rank, tasks in enumerate(order.tasks):
        for position, task in enumerate(tasks):
            where = _where(task, (rank, position))
            if task.kind not in ("F", "B", "I", "W"):
                raise DistIRError(f"a task is F, B, I or W, found {task.kind!r}", where)
            if not 0 <= task.stage < order.stages or task.microbatch < 0:
                raise DistIRError(f"expected stages from 0 to {order.stages - 1}, microbatches from 0", where)
            if order.rank_of[task.stage] != rank:
                raise DistIRError(f"stage {task.stage} is on rank {order.rank_of[task.stage]}", where)
            if task in places:
                raise DistIRError(f"the task is there twice, first at {_at(places[task])}", where)
            places[task] = (rank, position)
    return places


def _check_complete(order: Order, places: dict[Task, Place]) -> None:
    """Raises for the first task that is missing, or is too many."""
    for task, place in places.items():
        whole = Task("B", task.stage, task.microbatch)
        if task.kind in ("I", "W") and whole in places:
            raise DistIRError(f"{whole} at {_at(places[whole])} is the whole backward already", _where(task, place))
    # Of what is missing one is found soon: there are no more steps than tasks that are there.
    for microbatch in range(order.microbatches):
        for stage in range(order.stages):
            expected: tuple[Task, ...] = (Task("F", stage, microbatch),)
            if order.trains and Task("B", stage, microbatch) not in places:
                expected += (Task("I", stage, microbatch), Task("W", stage, microbatch))
            for task in expected:
                if task not in places:
                    both = f"{Task('B', stage, microbatch)} nor {task}"
                    found = f"neither {both}" if expected[1:] and expected[1] == task else f"no {task}"
                    present = f"of {order.microbatches} microbatches through {order.stages} stages"
                    raise DistIRError(f"there is {found}, {present}", f"rank {order.rank_of[stage]}")


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
