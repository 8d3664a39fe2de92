"""An order as text: a line for each rank, along time."""

from __future__ import annotations

from distir_relax.schedules.task import Order, Task
from distir_relax.schedules.task_times import Number
from distir_relax.schedules.timeline import Timeline, timeline


def grid(order: Order, found: Timeline | None = None, width: int = 400) -> str:
    """Ranks downwards, time to the right; tasks are as wide as they are long, idle time is blank::

        time   0           3           6           9           12
        rank 0 0F0 0F1 0F2         0B0---- 0F3 0B1----     0B2---- ...

    `found` says when tasks are done: without, they take as long as `Times` has it. The grid is as wide as the shortest
    task's name needs, and no wider than `width` letters: then names are cut, and what is too short is left out.
    """
    found = found or timeline(order)
    names = [f"rank {rank}" for rank in range(order.ranks)]
    margin = max(map(len, names)) + 1
    scale = _scale(found, width - margin)
    rows = [(name.ljust(margin) + _row(found, rank, scale)).rstrip() for rank, name in enumerate(names)]
    return "\n".join(["time".ljust(margin) + _ticks(found.makespan, scale), *rows]) + "\n"


def _scale(found: Timeline, width: int) -> float:
    """Letters for a unit of time."""
    wanted = [(len(str(task)) + 1) / float(end - start) for task, start, end in found.tasks() if end > start]
    most = width / float(found.makespan) if found.makespan else 1.0
    return min([most, max(wanted, default=1.0)])


def _row(found: Timeline, rank: int, scale: float) -> str:
    line = ""
    for task, start, end in zip(found.order.tasks[rank], found.starts[rank], found.ends[rank], strict=True):
        line = line.ljust(_column(start, scale)) + _cell(task, _column(end, scale) - _column(start, scale))
    return line.rstrip()


def _cell(task: Task, width: int) -> str:
    """A task's name, and a line as long as it lasts; a blank behind, where there is room for more than the kind."""
    name = str(task)
    if width > len(name):
        return name.ljust(width - 1, "-") + " "
    return {0: "", 1: task.kind}.get(width, f"{task.kind}{task.microbatch}"[: width - 1] + " ")


def _ticks(makespan: Number, scale: float) -> str:
    """Times, at least a dozen letters apart, at steps of 1, 2 or 5 times a power of ten, or of 3."""
    step = next(size for power in range(-12, 20) for size in _steps(power) if size * scale >= 12)
    line, time = "", 0.0
    while time <= float(makespan):
        line = line.ljust(_column(time, scale)) + f"{time:g} "
        time += step
    return line.rstrip()


def _steps(power: int) -> list[float]:
    return [factor * 10.0**power for factor in (1, 2, 3, 5)]


def _column(time: Number, scale: float) -> int:
    return round(float(time) * scale)
