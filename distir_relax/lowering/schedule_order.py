"""Order the ops of a pipeline by a schedule: a global order by the start times of tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from distir_relax.interpret.interpreter import list_steps
from distir_relax.ir import Module
from distir_relax.schedules import Kind, Order, Task, timeline
from distir_relax.simulation.schedule_order import order_ops


def order_tasks(module: Module, order: Order) -> Module:
    """Order the entry's ops by a schedule; distributed stage. See `simulation.schedule_order.order_ops`.

    A program without backwards is ordered by its forwards. Raises `DistIRError` if the schedule lacks a task of the
    program.
    """
    main = module.main
    numbers = order_ops(list_steps(main), [op.task_name for op in main.ops], task_sequence(order))
    ops = tuple(main.ops[number] for number in numbers)
    return replace(module, functions=(replace(main, ops=ops), *module.functions[1:]))


@lru_cache(maxsize=64)
def task_sequence(order: Order) -> tuple[str, ...]:
    """Return the tasks of all places by start time, assuming equal durations; whole backwards are split in two."""
    tasks = timeline(split_backwards(order)).tasks()
    sorted_tasks = sorted(tasks, key=lambda item: (item[1], item[0].kind != "F", item[0].stage))
    return tuple(str(task) for task, _, _ in sorted_tasks)


def split_backwards(order: Order) -> Order:
    """Split each whole backward into the gradients of inputs, which other stages wait for, and those of weights.

    Sending the former before computing the latter makes the bubble of 1F1B ``(p - 1) (F + I)``.
    """
    parts: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W")}
    rows = (
        tuple(Task(kind, task.stage, task.microbatch) for task in row for kind in parts.get(task.kind, (task.kind,)))
        for row in order.tasks
    )
    return Order(tuple(rows), order.rank_of)
