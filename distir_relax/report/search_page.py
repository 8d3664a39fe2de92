"""Search page: one self-contained HTML file with table, charts, and timelines of the best strategies."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from distir_relax.report.page import embedded, figure
from distir_relax.report.search import COLUMNS, cells, discarded, headline, memory_text
from distir_relax.strategy_search import Outcome, Search
from distir_relax.strategy_search.compact_timeline import compact_timeline
from distir_relax.strategy_search.outcome import Lanes
from distir_relax.support.files import write_text
from distir_relax.support.units import rate, seconds, size

# Horizontal axis of the second chart: the field of a point, and its label.
_AXES = {"samples": ("samples", "samples of a step"), "microbatches": ("microbatches", "microbatches of a step")}

TIME_LINES = 40
"""Number of strategies with a timeline that is simulated again, if the search did not record it."""


def write_search_page(search: Search, path: Path, model: str, machine: str) -> None:
    """Write `search_page` to a file. Raise `DistIRError` if it cannot be written."""
    write_text(path, search_page(search, model, machine))


def search_page(search: Search, model: str, machine: str, top: int = 20) -> str:
    """Return the page's text. `model` and `machine` are the model and the profile as named on the command line."""
    folder = resources.files("distir_relax.report") / "templates"
    timelines = {o: compact_timeline(search.simulate(o.candidate)) for o in _best(search) if not o.lanes}
    # With a single batch size, its chart would be one column.
    by = "samples" if len({o.samples for o in search.outcomes}) != 1 else "microbatches"
    points = [_point(o, o.lanes or timelines.get(o, ())) for o in search.outcomes if o.seconds]
    least = min(memory for _, memory in search.profile.device_specs(search.space.devices))
    data = {
        "points": points, "memory": least, "model": model, "profile": machine,
        "by": _AXES[by],
    }  # fmt: skip
    numbers = {(point["strategy"], point["samples"]): i for i, point in enumerate(points)}
    rows = "".join(_row(outcome, numbers[outcome.strategy, outcome.samples]) for outcome in search.ranked[:top])
    return Template((folder / "search.html").read_text()).substitute(
        title=escape(f"{model} on {search.space.devices} devices of {search.profile.name}"),
        style=(folder / "page.css").read_text(),
        headline="".join(figure(*row) for row in _figures(search)),
        by="batch" if by == "samples" else by,
        note=escape("; ".join((headline(search), *discarded(search)))),
        columns="".join(f"<th>{name}</th>" for name in COLUMNS),
        rows=rows,
        data=embedded(data),
        script="\n".join((folder / name).read_text() for name in ("common.js", "search.js")),
    )


def _best(search: Search) -> list[Outcome]:
    """Return the best outcomes overall, of each batch size, and of each D/T/P."""
    ranked = search.ranked or search.too_large
    by_degrees: dict[object, Outcome] = {}
    for outcome in ranked:
        s = outcome.candidate.strategy
        by_degrees.setdefault((s.data, s.tensor, s.pipeline), outcome)
    chosen = dict.fromkeys([*ranked[:10], *search.best_by_batch().values(), *by_degrees.values(), *ranked])
    return list(chosen)[:TIME_LINES]


def _point(outcome: Outcome, lanes: Lanes) -> dict[str, Any]:
    s = outcome.candidate.strategy
    degrees = {"D": s.data, "T": s.tensor, "P": s.pipeline}
    axis = max(degrees, key=lambda name: degrees[name])
    point: dict[str, Any] = {
        "strategy": outcome.strategy, "samples": outcome.samples, "seconds": outcome.seconds,
        "microbatches": s.microbatches, "throughput": outcome.throughput, "memory": outcome.memory,
        "fits": outcome.fits,
        "bubble": round(outcome.bubble, 5), "communication": round(outcome.communication, 5), "kind": "DTP".index(axis),
    }  # fmt: skip
    return {**point, "lanes": lanes} if lanes else point


def _figures(search: Search) -> list[tuple[str, str, str]]:
    fitting = search.ranked
    best = fitting[0] if fitting else None
    return [
        (
            "best strategy",
            best.strategy if best else "nothing fits",
            f"{best.samples:,} samples a step" if best else "",
        ),
        ("throughput", rate(best.throughput) if best else "-", seconds(best.seconds) if best else ""),
        ("memory", size(best.memory) if best else "-", f"of {memory_text(search)}"),
        ("configurations", f"{len(search.outcomes):,}", f"{len(fitting):,} fit"),
        ("searched in", seconds(search.seconds), f"{search.resumed:,} resumed" if search.resumed else ""),
    ]


def _row(outcome: Outcome, number: int) -> str:
    first, *others = map(escape, cells(outcome))
    link = f'<button type="button" class="pick" data-point="{number}">{first}</button>'
    return f"<tr><td>{link}</td>{''.join(f'<td>{text}</td>' for text in others)}</tr>"
