"""Scatter plots of predicted against measured step times and memory peaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from distir_relax.calibration.comparison import Outcome, Validation
from distir_relax.support.files import write_text
from distir_relax.support.units import count, seconds, size

_SIZE, _LEFT, _TOP, _PANEL_WIDTH = 400.0, 70.0, 40.0, 500.0
_STYLE = (
    "text{fill:#222}.frame,.grid{stroke:#888;fill:none}.grid{opacity:.35}.band{fill:#888;opacity:.2}"
    ".one{fill:#0072b2}.two{fill:#d55e00}.line{stroke:#222}.ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.line{stroke:#ddd}.ground{fill:#151515}"
    ".one{fill:#56b4e9}.two{fill:#e69f00}}"
)


@dataclass(frozen=True)
class _Dot:
    """A measured and a predicted value, in one unit."""

    name: str
    is_single_rank: bool
    measured: float
    predicted: float


@dataclass(frozen=True)
class _Panel:
    """One plot: title, name and format of its axes, relative width of its band, and points."""

    title: str
    quantity: str
    to_text: Callable[[float], str]
    band: float
    dots: Sequence[_Dot]


def write_plot(validation: Validation, path: Path) -> None:
    """Write the plots as SVG. Raise `DistIRError` if the file cannot be written."""
    write_text(path, plot(validation))


def plot(validation: Validation) -> str:
    """Plot measured against predicted values on logarithmic axes: step times, with a band of 15 %, and memory peaks of
    all ranks, with one of 5 %. The lines are the diagonals."""
    outcomes = validation.outcomes
    configurations = count(len(outcomes), "configuration")
    times = [_Dot(o.name, o.ranks == 1, o.measured, o.predicted) for o in outcomes]
    agreement = f"{configurations}, Spearman {validation.spearman:.3f}, MAPE {validation.mape:.1%}"
    panels = [
        _Panel(agreement, "time of a step", seconds, 0.15, times),
        _Panel(
            f"largest error {abs(validation.peak_error):.1%}", "memory peak", size, 0.05,
            [dot for o in outcomes for dot in _peaks(o)],
        ),
    ]  # fmt: skip
    panels = [panel for panel in panels if panel.dots]
    width = _PANEL_WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} 510" font-family="sans-serif" '
        'font-size="12">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width:.0f}" height="510"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * _PANEL_WIDTH:.0f} 0)">', *_draw(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _peaks(o: Outcome) -> list[_Dot]:
    pairs = zip(o.measured_peaks, o.predicted_peaks, strict=True)
    return [_Dot(f"{o.name}, rank {rank}", o.ranks == 1, float(m), float(p)) for rank, (m, p) in enumerate(pairs)]


def _draw(panel: _Panel) -> list[str]:
    values = [v for dot in panel.dots for v in (dot.measured, dot.predicted)]
    low, high = math.floor(2 * math.log10(min(values))) / 2, math.ceil(2 * math.log10(max(values))) / 2
    high = max(high, low + 0.5)

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * _SIZE

    def y(value: float) -> float:
        return _TOP + _SIZE - (math.log10(value) - low) / (high - low) * _SIZE

    a, b, factor = 10**low, 10**high, 1 + panel.band
    band = [(a, a * factor), (b / factor, b), (b, b), (b, b / factor), (a * factor, a), (a, a)]
    parts = [
        f'<polygon class="band" points="{" ".join(f"{x(p):.1f},{y(q):.1f}" for p, q in band)}"/>',
        f'<line class="line" x1="{x(a):.1f}" y1="{y(a):.1f}" x2="{x(b):.1f}" y2="{y(b):.1f}"/>',
        *_grid(range(math.ceil(low), math.floor(high) + 1), x, y, panel.to_text),
    ]
    for dot in panel.dots:
        kind = "one" if dot.is_single_rank else "two"
        label = f"{dot.name}: measured {panel.to_text(dot.measured)}, predicted {panel.to_text(dot.predicted)}"
        parts.append(
            f'<circle class="{kind}" cx="{x(dot.measured):.1f}" cy="{y(dot.predicted):.1f}" r="3.5" opacity="0.75">'
            f"<title>{escape(label)}</title></circle>"
        )
    return [*parts, *_frame(panel)]


def _grid(
    exponents: Sequence[int], x: Callable[[float], float], y: Callable[[float], float],
    to_text: Callable[[float], str],
) -> list[str]:  # fmt: skip
    parts = []
    for at in (10.0**exponent for exponent in exponents):
        text = to_text(at)
        parts += [
            f'<line class="grid" x1="{x(at):.1f}" y1="{_TOP}" x2="{x(at):.1f}" y2="{_TOP + _SIZE}"/>',
            f'<line class="grid" x1="{_LEFT}" y1="{y(at):.1f}" x2="{_LEFT + _SIZE}" y2="{y(at):.1f}"/>',
            f'<text x="{x(at):.1f}" y="{_TOP + _SIZE + 16}" text-anchor="middle">{text}</text>',
            f'<text x="{_LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{text}</text>',
        ]
    return parts


def _frame(panel: _Panel) -> list[str]:
    middle = _TOP + _SIZE / 2
    return [
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{panel.title}</text>',
        f'<text x="{_LEFT + _SIZE / 2}" y="{_TOP + _SIZE + 38}" text-anchor="middle">measured {panel.quantity}</text>',
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">predicted</text>',
        f'<circle class="one" cx="{_LEFT + 14}" cy="{_TOP + 16}" r="3.5"/>'
        f'<text x="{_LEFT + 24}" y="{_TOP + 20}">1 rank</text>',
        f'<circle class="two" cx="{_LEFT + 14}" cy="{_TOP + 34}" r="3.5"/>'
        f'<text x="{_LEFT + 24}" y="{_TOP + 38}">more</text>',
    ]
