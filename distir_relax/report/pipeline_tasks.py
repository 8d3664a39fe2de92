"""Pipeline tasks: the task order of a program as text, and charts of predicted and measured tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from distir_relax.ir import Module
from distir_relax.schedules import Order, Task, grid
from distir_relax.simulation.pipeline_tasks import task_times
from distir_relax.simulation.simulation import Simulation
from distir_relax.support.files import write_text
from distir_relax.support.units import seconds

_WIDTH, _MARGIN, _HEIGHT, _GAP = 1200, 130, 20, 3
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#59636e}.n{font-size:11px;text-anchor:middle;fill:#fff}"
    ".F{fill:#0072b2}.I{fill:#00795a}.W{fill:#9a5b00}.g{fill:#fff}.t{stroke:#59636e}"
    "@media(prefers-color-scheme:dark){text{fill:#a3adb6}.n{fill:#0b1014}.F{fill:#56b4e9}.I{fill:#3fbf95}.W{fill:#e69f00}"
    ".g{fill:#14171a}.t{stroke:#a3adb6}}"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a chart: its name, and its tasks with start and end in seconds."""

    name: str
    tasks: Sequence[tuple[str, float, float]]


def program_order(module: Module) -> Order | None:
    """Return the task order of each pipeline rank of a distributed program; None without tasks."""
    mesh, calls = module.meshes[0], [op for op in module.main.ops if op.task and op.devices]
    if not calls:
        return None
    size = mesh.size // mesh.shape[0]
    rows: list[list[Task]] = [[] for _ in range(mesh.shape[0])]
    place_of: dict[int, int] = {}
    for op in calls:
        stage, kind, microbatch = (op.task[key] for key in ("stage", "kind", "microbatch"))
        place = (op.devices or (0,))[0] // size
        place_of[stage] = place  # type: ignore[index]
        rows[place].append(Task(kind, stage, microbatch))  # type: ignore[arg-type]
    return Order(tuple(map(tuple, rows)), tuple(place_of[stage] for stage in sorted(place_of)))


def schedule_text(module: Module) -> str:
    """Return the schedule of a pipeline as comments of a program's text, with tasks of equal length; or ""."""
    order = program_order(module)
    return "" if order is None else "".join(f"# {line}\n" for line in grid(order, width=160).splitlines())


def predicted_rows(simulation: Simulation) -> list[Row]:
    """Return a row for each device class with tasks, named after its first device."""
    tasks: dict[int, list[tuple[str, float, float]]] = {}
    for task in task_times(simulation):
        tasks.setdefault(task.device_class, []).append((task.name, task.start, task.end))
    first = {c: int(simulation.members[c][0]) for c in tasks}
    return [Row(f"rank {first[c]}", tasks[c]) for c in sorted(tasks, key=first.__getitem__)]


def chart(rows: Sequence[Row]) -> str:
    """Draw the rows on a common time axis, as SVG."""
    end = max((task[2] for row in rows for task in row.tasks), default=0.0) or 1.0
    scale = (_WIDTH - _MARGIN - 10) / end
    height = len(rows) * (_HEIGHT + _GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect class="g" width="{_WIDTH}" height="{height}"/>',
    ]
    for number, row in enumerate(rows):
        top = number * (_HEIGHT + _GAP)
        parts.append(f'<text x="0" y="{top + 15}">{escape(row.name)}</text>')
        parts += [_box(task, start, stop, scale, top) for task, start, stop in row.tasks]
    axis_top = len(rows) * (_HEIGHT + _GAP) + 4
    for part in range(6):
        x = _MARGIN + part * end / 5 * scale
        parts.append(f'<line class="t" x1="{x:.1f}" y1="{axis_top - 4}" x2="{x:.1f}" y2="{axis_top}"/>')
        # Centred labels at the edges would be cut off.
        anchor = "start" if part == 0 else "end" if part == 5 else "middle"
        place = f'x="{x:.1f}" y="{axis_top + 14}" style="text-anchor:{anchor}"'
        parts.append(f"<text {place}>{escape(seconds(part * end / 5) if part else '0')}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_chart(predicted: Sequence[Row], measured: Sequence[Row], path: Path) -> None:
    """Write measured task times, each below its prediction, to an SVG file.

    Only the first rank of a device class has a prediction. Raises `DistIRError` if the file cannot be written.
    """
    expected = {row.name: row for row in predicted}
    rows: list[Row] = []
    for row in measured:
        if row.name in expected:
            rows.append(Row(f"{row.name}, predicted", expected[row.name].tasks))
        rows.append(Row(f"{row.name}, measured", row.tasks))
    write_text(path, chart(rows))


def _box(task: str, start: float, stop: float, scale: float, top: int) -> str:
    kind = next((letter for letter in "FIW" if letter in task), "F")
    x, width = _MARGIN + start * scale, max((stop - start) * scale - 0.5, 0.5)
    tooltip = f"{task}: {seconds(stop - start)}, from {seconds(start)} on"
    box = f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT}" rx="2">'
    svg = f"{box}<title>{escape(tooltip)}</title></rect>"
    if width > 7 * len(task):
        svg += f'<text class="n" x="{x + width / 2:.1f}" y="{top + 14}">{task}</text>'
    return svg
