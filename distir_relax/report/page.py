"""Report page of a simulation: one self-contained HTML file with timeline, memory, top ops and communication."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from distir_relax.report.communication_matrix import matrix
from distir_relax.report.critical_path import critical_path_section
from distir_relax.report.memory import memory_charts
from distir_relax.report.pipeline_tasks import chart, predicted_rows
from distir_relax.report.sensitivity import sensitivity_section
from distir_relax.report.timeline import LANES, Timeline, as_data, timeline
from distir_relax.report.what_if import what_if_section
from distir_relax.simulation.class_names import class_name
from distir_relax.simulation.critical_path import critical_path
from distir_relax.simulation.memory_categories import CATEGORIES
from distir_relax.simulation.op_timer import COMMUNICATION, FEMTOSECONDS
from distir_relax.simulation.sensitivity import Sensitivity, sensitivity_within
from distir_relax.simulation.simulation import Simulation, interval_text
from distir_relax.support.files import write_text
from distir_relax.support.units import count, seconds, size

ROWS = 15
"""Number of ops in the table of top ops."""

MOST_TASKS = 4_000
"""Maximum number of pipeline tasks that are drawn."""

SCRIPTS = ("common.js", "timeline.js", "memory.js", "matrix.js")

SIMULATION_SECONDS = 0.5
"""A program whose simulation takes longer is not simulated again for a page: this would take about twenty times."""

LONG = 20
"""Values with more characters are drawn smaller, and over two columns."""


def write_page(
    simulation: Simulation,
    path: Path,
    title: str,
    proof: Sequence[str] = (),
    limits: Sensitivity | None = None,
) -> None:
    """Write `page` to a file. Raise `DistIRError` if it cannot be written."""
    write_text(path, page(simulation, title, proof, limits))


def page(simulation: Simulation, title: str, proof: Sequence[str] = (), limits: Sensitivity | None = None) -> str:
    """Return the report as the text of an HTML file, with the statements of the plan's proof, if it has one.

    `limits` is the sensitivity to the machine's resources. Without it, it is computed if one simulation takes at most
    `SIMULATION_SECONDS`.
    """
    limits = limits or sensitivity_within(simulation, SIMULATION_SECONDS)
    path = critical_path(simulation)
    line = timeline(simulation, path=path)
    makespan = max(simulation.clocks)
    traffic = matrix(simulation)
    charts = memory_charts(simulation)
    data = {
        "timeline": as_data(line, makespan),
        "memory": {"charts": charts, "categories": CATEGORIES[:-1]},
        "matrix": traffic,
        "makespan": simulation.makespan,
    }
    folder = resources.files("distir_relax.report") / "templates"
    return Template((folder / "page.html").read_text()).substitute(
        title=escape(title),
        style=(folder / "page.css").read_text(),
        headline="".join(figure(*row) for row in _headline(simulation, limits)),
        what_if=what_if_section(simulation),
        tasks=_tasks(simulation),
        critical_path=critical_path_section(simulation, path),
        sensitivity=sensitivity_section(limits),
        timeline_note=escape(timeline_note(simulation, line)),
        memory_note=escape(_memory_note(len(charts), len(simulation.members))),
        ops="".join(op_row(row) for row in top_ops(simulation)[:ROWS]),
        ops_note=escape(ops_note(len(top_ops(simulation)))),
        matrix_note=escape(_matrix_note(traffic["block"], traffic["total"])),
        proof=_proof(proof),
        data=embedded(data),
        script="\n".join((folder / name).read_text() for name in SCRIPTS),
    )


def _proof(statements: Sequence[str]) -> str:
    """Return the section with the statements that were proved."""
    if not statements:
        return ""
    rows = "".join(f"<li>{escape(statement)}</li>" for statement in statements)
    return f'<section>\n<h2>Proof</h2>\n<ul class="proof">{rows}</ul>\n</section>'


def embedded(data: Any) -> str:
    """Return data as JSON within a page's script element."""
    # "</script" would end the script, so its data must not contain "<".
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def figure(name: str, value: str, note: str, bad: bool = False) -> str:
    """Return a key figure of a page as HTML; a long strategy may break after a comma."""
    shown = escape(value).replace(",", ",<wbr>")
    kinds = "figure" + " bad" * bad + " long" * (len(value) > LONG)
    return f'<div class="{kinds}"><dt>{escape(name)}</dt><dd>{shown}</dd><small>{escape(note)}</small></div>'


@dataclass(frozen=True)
class OpTime:
    """Total time of an op: number of executions and seconds, summed over devices, and share of all devices' time."""

    name: str
    communicates: bool
    count: int
    total: float
    share: float


def top_ops(simulation: Simulation) -> list[OpTime]:
    """Return the ops by decreasing total time over all devices.

    Ops on streams are not counted, only the time for which they block the devices' own order.
    """
    counts: dict[tuple[str, bool], int] = {}
    totals: dict[tuple[str, bool], int] = {}
    members = [len(m) for m in simulation.members]
    for event, _ in simulation.events():
        if event.stream:
            continue
        key = (event.op.name, event.kind == COMMUNICATION)
        devices = sum(members[c] for c in event.classes)
        counts[key] = counts.get(key, 0) + devices
        totals[key] = totals.get(key, 0) + event.duration * devices
    total_time = simulation.makespan * simulation.devices
    rows = [
        OpTime(*key, counts[key], total / FEMTOSECONDS, total / FEMTOSECONDS / total_time if total_time else 0.0)
        for key, total in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.total, row.name))


def _headline(s: Simulation, limits: Sensitivity | None) -> Iterable[tuple[str, str, str, bool]]:
    device = s.fullest
    peak = s.peak(device)
    between = "" if s.interval is None else f"; 90 %: {interval_text(s.interval)}"
    yield "makespan", seconds(s.makespan), f"on {count(s.devices, 'device')} of {s.profile.name}{between}", False
    if s.strategy is not None:
        yield "strategy", s.strategy, "D/T/P/K: data, tensor, pipeline, microbatches", False
    if s.heterogeneity:
        yield "devices", f"{s.speed.max():g} to {s.speed.min():g}", f"speed, {s.heterogeneity}", False
    if s.throughput is not None:
        yield "throughput", f"{_digits(s.throughput)}/s", f"samples, of {s.samples:,} in all", False
    note = f"of {size(s.memory[device])}, {class_name(s, int(s.class_of[device]))}"
    yield "peak memory", size(peak.bytes), note if s.fits else f"does not fit: {note}", not s.fits
    yield "compute", f"{s.computing:.1%}", "of all devices' time", False
    overlapped = s.overlapped.any()
    note = f"and {seconds(float(s.overlapped.mean()))} a device overlapped" if overlapped else "of all devices' time"
    yield "communication", f"{s.communication:.1%}", note, False
    yield "bubble", f"{s.bubble:.1%}", "waiting, of all devices' time", False
    if limits is not None and limits.bound_by is not None:
        saved = 1 - limits.gains[0].twice / limits.seconds
        yield "bound by", limits.bound_by, f"twice as fast, a step is {saved:.1%} shorter", False


def _digits(value: float) -> str:
    """Format a number with four digits, without an exponent."""
    places = 3 - math.floor(math.log10(value))
    return f"{round(value, places):,.{max(places, 0)}f}"


def op_row(row: OpTime) -> str:
    """Return a row of the table of ops as HTML."""
    kind = "communication" if row.communicates else "compute"
    return (
        f'<tr><td><i class="swatch {kind}"></i><code>{escape(row.name)}</code></td><td>{row.count:,}</td>'
        f"<td>{escape(seconds(row.total))}</td><td>{row.share:.1%}</td>"
        f'<td class="share"><i class="{kind}" style="width:{min(row.share, 1):.2%}"></i></td></tr>'
    )


def _tasks(simulation: Simulation) -> str:
    """Return the pipeline schedule as a section with a picture; empty for other programs."""
    rows = predicted_rows(simulation)
    if not rows:
        return ""
    count = sum(len(row.tasks) for row in rows)
    if count > MOST_TASKS:
        return f'<section><h2>Schedule</h2><p class="note">{count:,} tasks are too many to draw.</p></section>'
    image = base64.b64encode(chart(rows).encode()).decode()
    return (
        '<section><h2>Schedule</h2><p class="note">Each task with its stage, its kind (F forward, I gradients of '
        "inputs, W gradients of weights) and its microbatch; one device represents all of its class.</p>"
        '<div class="scrolls"><img class="schedule" alt="The tasks of each stage along time" '
        f'src="data:image/svg+xml;base64,{image}"></div></section>'
    )


def timeline_note(simulation: Simulation, line: Timeline) -> str:
    """Return the sentences above a time line."""
    parts = ["Devices that run the same program at the same times share a lane."]
    classes = len(simulation.members)
    if classes > LANES:
        parts.append(_shown(LANES, classes))
    if line.joined:
        parts.append(
            f"{line.joined:,} ops shorter than {seconds(line.threshold / FEMTOSECONDS)} are merged with their "
            "neighbours: the bar shows its shares of compute, communication and idle time."
        )
    return " ".join(parts)


def _memory_note(charts: int, classes: int) -> str:
    return f"All charts have the same scale. {_shown(charts, classes)}" if charts > 1 else ""


def _shown(shown: int, classes: int) -> str:
    return "" if shown == classes else f"{shown} of {classes:,} device classes are shown."


def ops_note(ops: int) -> str:
    """Return the sentences above the table of top ops."""
    shown = f"The first {ROWS} of {ops}. " if ops > ROWS else ""
    return f"{shown}Count and total are over all devices; the share is of all devices' time."


def _matrix_note(block: int, total: float) -> str:
    if not total:
        return "There is no communication between devices."
    rows = f"A row is a block of {block} devices; the diagonal is communication within a block. " if block > 1 else ""
    return f"{rows}{size(total)} in all. Collectives are counted as rings."
