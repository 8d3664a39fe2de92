"""Predictions against measurements: as a table, as JSON, and as a scatter plot."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path

from distir_relax.calibration.validate import Validation
from distir_relax.report.simulation import write_text


def table(validation: Validation) -> str:
    """One line a configuration, and how well all agree."""
    width = max(len(o.name) for o in validation.outcomes)
    lines = [f"{'configuration':{width}}  ranks   measured  predicted   error"]
    for o in validation.outcomes:
        lines.append(
            f"{o.name:{width}}  {o.ranks:5}  {o.measured * 1e3:6.2f} ms  {o.predicted * 1e3:6.2f} ms  {o.error:+z6.1%}"
        )
    count = len(validation.outcomes)
    lines.append(f"{count} configurations: Spearman {validation.spearman:.3f}, MAPE {validation.mape:.1%}")
    return "\n".join(lines)


def json_text(validation: Validation) -> str:
    """The result as JSON text."""
    return json.dumps(validation.as_json())


def write_plot(validation: Validation, path: Path) -> None:
    """Write a scatter plot, both axes logarithmic, as SVG. Raises `DistIRError` when it cannot be written."""
    write_text(path, plot(validation))


def plot(validation: Validation) -> str:
    """The scatter plot of measured against predicted step times; the line is where they agree, the band 15 % around."""
    values = [v for o in validation.outcomes for v in (o.measured, o.predicted)]
    low, high = math.floor(2 * math.log10(min(values))) / 2, math.ceil(2 * math.log10(max(values))) / 2
    high = max(high, low + 0.5)
    size, left, top = 400.0, 70.0, 40.0

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * size

    def y(value: float) -> float:
        return top + size - (math.log10(value) - low) / (high - low) * size

    a, b = 10**low, 10**high
    band = [(a, a * 1.15), (b / 1.15, b), (b, b), (b, b / 1.15), (a * 1.15, a), (a, a)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 510" font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222}.frame,.grid{stroke:#888;fill:none}.grid{opacity:.35}.band{fill:#888;opacity:.2}"
        ".one{fill:#0072b2}.two{fill:#d55e00}.line{stroke:#222}.ground{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.line{stroke:#ddd}.ground{fill:#151515}"
        ".one{fill:#56b4e9}.two{fill:#e69f00}}</style>",
        '<rect class="ground" width="500" height="510"/>',
        f'<polygon class="band" points="{" ".join(f"{x(p):.1f},{y(q):.1f}" for p, q in band)}"/>',
        f'<line class="line" x1="{x(a):.1f}" y1="{y(a):.1f}" x2="{x(b):.1f}" y2="{y(b):.1f}"/>',
    ]
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        at = 10.0**exponent
        parts += [
            f'<line class="grid" x1="{x(at):.1f}" y1="{top}" x2="{x(at):.1f}" y2="{top + size}"/>',
            f'<line class="grid" x1="{left}" y1="{y(at):.1f}" x2="{left + size}" y2="{y(at):.1f}"/>',
            f'<text x="{x(at):.1f}" y="{top + size + 16}" text-anchor="middle">{_time(at)}</text>',
            f'<text x="{left - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{_time(at)}</text>',
        ]
    for o in validation.outcomes:
        kind = "one" if o.ranks == 1 else "two"
        label = escape(f"{o.name}: measured {o.measured * 1e3:.3g} ms, predicted {o.predicted * 1e3:.3g} ms")
        parts.append(
            f'<circle class="{kind}" cx="{x(o.measured):.1f}" cy="{y(o.predicted):.1f}" r="3.5" opacity="0.75">'
            f"<title>{label}</title></circle>"
        )
    count = len(validation.outcomes)
    title = f"{count} configurations, Spearman {validation.spearman:.3f}, MAPE {validation.mape:.1%}"
    parts += [
        f'<rect class="frame" x="{left}" y="{top}" width="{size}" height="{size}"/>',
        f'<text x="{left}" y="24" font-size="14">{title}</text>',
        f'<text x="{left + size / 2}" y="{top + size + 38}" text-anchor="middle">measured time of a step</text>',
        f'<text transform="translate(18 {top + size / 2}) rotate(-90)" text-anchor="middle">predicted</text>',
        f'<circle class="one" cx="{left + 14}" cy="{top + 16}" r="3.5"/>'
        f'<text x="{left + 24}" y="{top + 20}">1 rank</text>',
        f'<circle class="two" cx="{left + 14}" cy="{top + 34}" r="3.5"/>'
        f'<text x="{left + 24}" y="{top + 38}">more</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.999 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0e} s"
