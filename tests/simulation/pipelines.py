"""Pipelines of equal stages, written with the builder by a schedule, whose times can be worked out by hand."""

from __future__ import annotations

from itertools import groupby

from distir_relax.ir import Module, Value
from distir_relax.layout import DeviceMesh
from distir_relax.lowering.program_builder import ProgramBuilder
from distir_relax.schedules import Task, order_of, timeline

ROWS, WIDTH = 3, 5
ACTIVATION, WEIGHT = ROWS * WIDTH * 8, WIDTH * WIDTH * 8
FORWARD, BACKWARD = 2 * ROWS * WIDTH * WIDTH, 4 * ROWS * WIDTH * WIDTH
"""Operations of a task: one product forwards, two backwards."""


def steps(schedule: str, stages: int, microbatches: int) -> list[list[Task]]:
    """The tasks that start at the same time."""
    found = timeline(order_of(schedule, stages, microbatches)).tasks()
    timed = sorted((start, task.stage, task) for task, start, _ in found)
    return [[task for *_, task in group] for _, group in groupby(timed, key=lambda item: item[0])]


def pipeline(schedule: str, stages: int, microbatches: int) -> Module:
    """Each stage multiplies by its weight forwards and keeps the result, which it multiplies backwards.

    Only the gradient of the last microbatch is given back, so that nothing piles up at the end.
    """
    program = ProgramBuilder(DeviceMesh((stages,), ("stage",)))
    forward, backward = program.function("forward"), program.function("backward")
    x, w = forward.input("x", (ROWS, WIDTH), "float64"), forward.input("w", (WIDTH, WIDTH), "float64")
    forward.output("y", forward.emit("matmul", x, w))
    y, dy = backward.input("y", (ROWS, WIDTH), "float64"), backward.input("dy", (ROWS, WIDTH), "float64")
    w = backward.input("w", (WIDTH, WIDTH), "float64")
    backward.output("dx", backward.emit("matmul", dy, w))
    backward.output("other", backward.emit("matmul", y, w))
    main = program.function("main")
    devices = [program.devices(stage=s) for s in range(stages)]
    weights = [main.input(f"w{s}", (WIDTH, WIDTH), "float64", devices[s], "parameter") for s in range(stages)]
    batches = [main.input(f"x{m}", (ROWS, WIDTH), "float64", devices[0]) for m in range(microbatches)]
    labels = [main.input(f"dy{m}", (ROWS, WIDTH), "float64", devices[-1]) for m in range(microbatches)]
    made: dict[tuple[int, int], Value] = {}
    below: dict[tuple[int, int], Value] = {}
    for step in steps(schedule, stages, microbatches):
        received = {}
        for task in step:
            s, m = task.stage, task.microbatch
            if task.kind == "F":
                received[task] = main.send(made[s - 1, m], devices[s]) if s else batches[m]
            else:
                received[task] = main.send(below[s + 1, m], devices[s]) if s < stages - 1 else labels[m]
        for task in step:
            s, m = task.stage, task.microbatch
            if task.kind == "F":
                (made[s, m],) = main.call(forward, received[task], weights[s], devices=devices[s])
            else:
                found = main.call(backward, made.pop((s, m)), received[task], weights[s], devices=devices[s])
                below[s, m] = found[0]
    main.output("dx", below[0, microbatches - 1])
    return program.build()
