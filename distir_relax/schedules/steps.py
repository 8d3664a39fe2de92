"""1F1B as a list of steps, for programs that are written step by step."""

from __future__ import annotations

from distir_relax.schedules.table import order_of
from distir_relax.schedules.task import Task
from distir_relax.schedules.timeline import timeline
from distir_relax.schedules.times import Number, Times


def one_forward_one_backward(stages: int, microbatches: int) -> list[tuple[Task, ...]]:
    """The tasks of each step start at the same time, if a backward takes as long as two forwards.

    A program that is written in each step first with what is sent to its tasks and then with the tasks never makes a
    stage wait for more than its inputs. Raises `DistIRError` for less than one stage or microbatch.
    """
    steps: dict[Number, list[Task]] = {}
    for task, start, _ in timeline(order_of("1f1b", stages, microbatches), Times()).tasks():
        steps.setdefault(start, []).append(task)
    return [tuple(steps[start]) for start in sorted(steps)]
