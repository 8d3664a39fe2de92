"""The page of a training run as one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from distir_relax.report.curves import Curve, chart, smoothed
from distir_relax.report.page import ROWS, embedded, figure, op_row, ops_note, timeline_note, top_ops
from distir_relax.report.run_record import RunRecord
from distir_relax.report.timeline import Timeline, as_data, timeline
from distir_relax.simulation.simulation import Simulation
from distir_relax.support.files import write_text
from distir_relax.support.learning_rate import MOMENTUM, RATE, is_of_kind
from distir_relax.support.units import count, seconds, size

_SCRIPTS = ("common.js", "timeline.js")
_PART_KINDS = {
    "compute": "compute", "communication": "communication", "data": "c0", "first step": "c2", "evaluation": "c1",
    "checkpoints": "c3",
}  # fmt: skip


def write_training_page(record: RunRecord, predicted: Simulation | None, path: Path) -> None:
    """Write `training_page` to a file. Raise `DistIRError` if it cannot be written."""
    write_text(path, training_page(record, predicted))


def training_page(record: RunRecord, predicted: Simulation | None) -> str:
    """Return the page of a run, with the prediction of a step if there is one, as the text of an HTML file."""
    manifest = record.run.manifest
    line = None if predicted is None else timeline(predicted)
    return Template(_template("training.html")).substitute(
        title=escape(f"{manifest.name}, {count(manifest.mesh.size, 'rank')}"),
        style=_template("page.css"),
        headline="".join(figure(*row) for row in _headline(record)),
        curves="".join(_curves(record)),
        parts=_parts(record),
        parts_note="Seconds of the first rank. Communication includes waiting for other ranks, data is waiting for a "
        "batch. The first step, which prepares kernels and memory, is apart.",
        prediction="" if predicted is None or line is None else _prediction(record, predicted, line),
        script="" if predicted is None or line is None else _script(predicted, line),
    )  # fmt: skip


def _headline(record: RunRecord) -> Iterable[tuple[str, str, str, bool]]:
    last, ended, run = record.steps[-1], record.ended, record.run
    reason = "" if ended is None or not ended.reason else f": {ended.reason}"
    note = f"of {run.options.steps:,}{reason}" if ended is not None else "ended by an error"
    yield "steps", f"{last.step:,}", note, ended is None
    finite = math.isfinite(last.loss)
    yield "loss", f"{last.loss:.4g}", f"at first {record.steps[0].loss:.4g}", not finite
    for name, value in (record.evaluations[max(record.evaluations)] if record.evaluations else {}).items():
        yield f"evaluation: {name}", f"{value:.4g}", f"after step {max(record.evaluations):,}", False
    step = record.median(lambda result: result.seconds)
    work = record.median(lambda result: float(result.work))
    yield "throughput", f"{work / step:,.0f}/s" if step else "-", f"{run.unit}, {work:,.0f} a step", False
    yield "step time", seconds(step), "median", False
    waited = record.median(lambda result: result.data_seconds)
    yield "waiting for data", f"{waited / step:.1%}" if step else "-", "of a step, median", waited > 0.1 * step
    yield (
        "peak memory",
        size(max(r.peak_memory for r in record.steps)),
        "of the first process, libraries included",
        False,
    )


def _curves(record: RunRecord) -> Iterable[str]:
    losses = record.losses
    curves = [Curve("each step", "faint", losses), Curve("average", "compute", smoothed(losses))]
    evaluated = [(step, metrics["loss"]) for step, metrics in record.evaluations.items() if "loss" in metrics]
    yield chart("loss", [*curves, Curve("evaluation", "dots", evaluated)], _number)
    others = dict.fromkeys(name for metrics in record.evaluations.values() for name in metrics if name != "loss")
    for name in others:
        points = [(step, metrics[name]) for step, metrics in record.evaluations.items() if name in metrics]
        yield chart(f"evaluation: {name}", [Curve(name, "c1", points)], _number)
    later = record.steps[1:] or record.steps
    named = dict.fromkeys(name for r in record.steps for name in r.rates)
    kinds = ("compute", "c1", "c2", "c3")
    for title, kind in (("learning rate", RATE), ("momentum", MOMENTUM)):
        rates = [name for name in named if is_of_kind(name, kind)]
        curves = [
            Curve(name.replace("_", " "), kinds[number % 4], [(r.step, r.rates[name]) for r in later])
            for number, name in enumerate(rates)
        ]
        if curves:
            yield chart(title, curves, _number, from_zero=kind == RATE)
    norms = [(r.step, r.gradient_norm) for r in record.steps if r.gradient_norm is not None]
    if norms:
        yield chart("norm of the gradients", [Curve("before clipping", "compute", norms)], _number, from_zero=True)
    times = [(float(r.step), r.seconds) for r in later]
    waits = [(float(r.step), r.communication_seconds) for r in later]
    yield chart(
        "step time", [Curve("step", "compute", times), Curve("communication", "communication", waits)], seconds, True
    )


def _parts(record: RunRecord) -> str:
    parts = {name: max(0.0, value) for name, value in record.parts.items()}
    total = math.fsum(parts.values()) or 1.0
    bar = "".join(
        f'<i class="{_PART_KINDS[name]}" style="width:{value / total:.3%}" title="{escape(name)}"></i>'
        for name, value in parts.items()
        if value > 0
    )
    rows = "".join(
        f'<tr><td><i class="swatch {_PART_KINDS[name]}"></i>{escape(name)}</td><td>{escape(seconds(value))}</td>'
        f"<td>{value / total:.1%}</td></tr>"
        for name, value in parts.items()
    )
    return (
        f'<div class="strip">{bar}</div><div class="scrolls"><table class="narrow"><thead><tr><th></th><th>time</th>'
        f"<th>share</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _prediction(record: RunRecord, predicted: Simulation, line: Timeline) -> str:
    step = record.median(lambda result: result.seconds - result.data_seconds)
    communication = record.median(lambda result: result.communication_seconds)
    blocked = float(predicted.communication) * predicted.makespan
    rows: Sequence[tuple[str, float, float]] = (
        ("step, without data", step, predicted.makespan), ("communication and waiting", communication, blocked)
    )  # fmt: skip
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(seconds(measured))}</td><td>{escape(seconds(guess))}</td>"
        f"<td>{guess / measured - 1:+.1%}</td></tr>" if measured else
        f"<tr><td>{escape(name)}</td><td>0</td><td>{escape(seconds(guess))}</td><td></td></tr>"
        for name, measured, guess in rows
    )  # fmt: skip
    ops = top_ops(predicted)
    return Template(_template("training_prediction.html")).substitute(
        profile=escape(predicted.profile.name),
        peak=escape(size(predicted.peak(predicted.fullest).bytes)),
        rows=body,
        timeline_note=escape(timeline_note(predicted, line)),
        ops_note=escape(ops_note(len(ops))),
        ops="".join(op_row(row) for row in ops[:ROWS]),
    )


def _script(predicted: Simulation, line: Timeline) -> str:
    data = {"timeline": as_data(line, max(predicted.clocks)), "makespan": predicted.makespan}
    script = "\n".join(map(_template, _SCRIPTS))
    return (
        f'<script type="application/json" id="data">{embedded(data)}</script>\n<script>\n"use strict";\n'
        f"(() => {{\n{script}\n}})();\n</script>"
    )


def _template(name: str) -> str:
    return (resources.files("distir_relax.report") / "templates" / name).read_text()


def _number(value: float) -> str:
    return f"{value:.4g}"
