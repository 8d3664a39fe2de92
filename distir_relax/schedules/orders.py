"""Pipeline schedules: in which order the stages work on the microbatches.

A schedule is a list of steps; the tasks of a step start at the same time. A program that is written step by step,
in each step first what is sent to its tasks and then the tasks, never makes a stage wait for more than its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from distir_relax.errors import DistIRError


@dataclass(frozen=True, slots=True)
class Task:
    """The forward or the backward step of one microbatch on one stage."""

    stage: int
    microbatch: int
    forward: bool


Schedule = list[tuple[Task, ...]]


def fill_drain(stages: int, microbatches: int, forward: int = 1, backward: int = 2) -> Schedule:
    """All forward steps, then all backward steps (GPipe): each stage holds all microbatches at once.

    `forward` and `backward` are how long a task takes, in any unit. Raises `DistIRError` for less than one stage or
    microbatch.
    """
    _check(stages, microbatches)
    orders = [
        [Task(s, m, True) for m in range(microbatches)] + [Task(s, m, False) for m in range(microbatches)]
        for s in range(stages)
    ]
    return _timed(orders, forward, backward)


def one_forward_one_backward(stages: int, microbatches: int, forward: int = 1, backward: int = 2) -> Schedule:
    """One forward, one backward (PipeDream's 1F1B, flushed): stage `s` of P holds at most P - s microbatches at once.

    Stage s does P - s - 1 forward tasks to warm up, then a forward and a backward task in turn, then the backward
    tasks that are left. Arguments and errors are those of `fill_drain`.
    """
    _check(stages, microbatches)
    orders = []
    for s in range(stages):
        ahead = min(stages - s - 1, microbatches)
        order = [Task(s, m, True) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                order.append(Task(s, ahead + m, True))
            order.append(Task(s, m, False))
        orders.append(order)
    return _timed(orders, forward, backward)


def _check(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise DistIRError(f"a pipeline has at least one stage and one microbatch, found {stages} and {microbatches}")


def _timed(orders: list[list[Task]], forward: int, backward: int) -> Schedule:
    """The steps in which the tasks start when each stage keeps its order and nothing takes time to send."""
    stages = len(orders)
    done: dict[Task, int] = {}
    starts: dict[int, list[Task]] = {}
    clocks, heads = [0] * stages, [0] * stages
    while any(heads[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while heads[s] < len(orders[s]):
                task = orders[s][heads[s]]
                before = _before(task, stages)
                if before is not None and before not in done:
                    break
                start = max(clocks[s], done[before] if before else 0)
                starts.setdefault(start, []).append(task)
                done[task] = clocks[s] = start + (forward if task.forward else backward)
                heads[s] += 1
    return [tuple(starts[start]) for start in sorted(starts)]


def _before(task: Task, stages: int) -> Task | None:
    """The task whose result a task waits for."""
    if task.forward:
        return Task(task.stage - 1, task.microbatch, True) if task.stage else None
    if task.stage == stages - 1:
        return Task(task.stage, task.microbatch, True)
    return Task(task.stage + 1, task.microbatch, False)
