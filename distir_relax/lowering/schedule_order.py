"""The ops of a pipeline in the order of a schedule: one that all places keep, by the times at which tasks begin."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from distir_relax.analysis.interpreter import steps_of
from distir_relax.analysis.schedule_order import in_order
from distir_relax.ir import Module
from distir_relax.schedules import Kind, Order, Task, timeline


def order_tasks(module: Module, order: Order) -> Module:
    """A module of the distributed stage whose entry's ops are in the order of a schedule; of one that does not train,
    in that of its forwards. See `analysis.in_order`.

    Raises `DistIRError` where the schedule lacks a task of the program.
    """
    main = module.main
    ops = tuple(main.ops[number] for number in in_order(steps_of(main), in_sequence(order)))
    return replace(module, functions=(replace(main, ops=ops), *module.functions[1:]))


@lru_cache(maxsize=64)
def in_sequence(order: Order) -> tuple[str, ...]:
    """The tasks of all places by the times at which they begin, if all take as long; whole backwards in two."""
    tasks = timeline(in_two(order)).tasks()
    ordered = sorted(tasks, key=lambda item: (item[1], item[0].kind != "F", item[0].stage))
    return tuple(str(task) for task, _, _ in ordered)


def in_two(order: Order) -> Order:
    """The order with each whole backward in two: the gradients of inputs, which others wait for, and of weights.

    So the first are sent before the second are made: the bubble of 1F1B is ``(p - 1) (F + I)``.
    """
    parts: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W")}
    rows = (
        tuple(Task(kind, task.stage, task.microbatch) for task in row for kind in parts.get(task.kind, (task.kind,)))
        for row in order.tasks
    )
    return Order(tuple(rows), order.rank_of)
