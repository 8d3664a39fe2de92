"""ASCII chart of an order: a line for each rank, along time."""

from __future__ import annotations

from distir_relax.schedules.task import Order, Task
from distir_relax.schedules.task_times import Number
from distir_relax.schedules.timeline import Timeline, timeline


def grid(order: Order, timing: Timeline | None = None, width: int = 400) -> str:
    """Draw ranks downwards and time to the right; tasks are as wide as they are long, idle time is blank::

        time   0           3           6           9           12
        rank 0 0F0 0F1 0F2         0B0---- 0F3 0B1----     0B2---- ...

    `timing` is the timeline, by default that of equal `Times`. The chart is as wide as the shortest task's name needs,
    and at most `width` characters: then names are cut, and tasks that are too short are omitted.
    """
    timing = timing or timeline(order)
    names = [f"rank {rank}" for rank in range(order.ranks)]
    margin = max(map(len, names)) + 1
    scale = _scale(timing, width - margin)
    rows = [(name.ljust(margin) + _row(timing, rank, scale)).rstrip() for rank, name in enumerate(names)]
    return "\n".join(["time".ljust(margin) + _ticks(timing.makespan, scale), *rows]) + "\n"


def _scale(timing: Timeline, width: int) -> float:
    """Return the characters per unit of time."""
    scales = [(len(str(task)) + 1) / float(end - start) for task, start, end in timing.tasks() if end > start]
    limit = width / float(timing.makespan) if timing.makespan else 1.0
    return min([limit, max(scales, default=1.0)])


def _row(timing: Timeline, rank: int, scale: float) -> str:
    line = ""
    for task, start, end in zip(timing.order.tasks[rank], timing.starts[rank], timing.ends[rank], strict=True):
        line = line.ljust(_column(start, scale)) + _cell(task, _column(end, scale) - _column(start, scale))
    return line.rstrip()


def _cell(task: Task, width: int) -> str:
    """Return a task's name, padded to its duration, with a trailing blank if it fits."""
    name = str(task)
    if width > len(name):
        return name.ljust(width - 1, "-") + " "
    return {0: "", 1: task.kind}.get(width, f"{task.kind}{task.microbatch}"[: width - 1] + " ")


def _ticks(makespan: Number, scale: float) -> str:
    """Return times, at least a dozen characters apart, at steps of 1, 2, 3 or 5 times a power of ten."""
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
