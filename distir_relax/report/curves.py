"""Line charts of measurements along the steps of a run, as SVG that follows a page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 200, 64, 12, 12, 32
MOST_POINTS = 600
"""Points of a line; a run of more steps is drawn by the least and the largest value of neighbouring steps."""


@dataclass(frozen=True)
class Curve:
    """A named line: values by step. `kind` is its CSS class: ``c0`` to ``c3``, ``faint``, or ``dots`` for points."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


def chart(title: str, curves: Sequence[Curve], to_text: Callable[[float], str], from_zero: bool = False) -> str:
    """Return a chart of curves along steps as a figure in HTML; values that are not finite are left out.

    `to_text` formats a value of the vertical axis. Without any value the chart says so.
    """
    shown = [Curve(c.name, c.kind, _thinned([p for p in c.points if math.isfinite(p[1])])) for c in curves]
    values = [value for curve in shown for _, value in curve.points]
    legend = "".join(f'<li><i class="key {c.kind}"></i>{escape(c.name)}</li>' for c in shown if c.points)
    caption = f'<figcaption>{escape(title)} <ul class="legend">{legend}</ul></figcaption>'
    if not values:
        return f'<figure class="curve">{caption}<p class="note">There are no finite values.</p></figure>'
    steps = [step for curve in shown for step, _ in curve.points]
    low, high = min([0.0] * from_zero + values), max(values)
    marks = _ticks(low, high, 4)
    low, high = min(low, marks[0]), max(high, marks[-1])
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for mark in marks:
        height = y(mark)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        label = escape(to_text(mark)) if mark else "0"
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{label}</text>')
    for step in _whole_ticks(first, last):
        anchor = "end" if x(step) > _WIDTH - 40 else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 16}" text-anchor="{anchor}">{step:,.0f}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="{_HEIGHT - 16}" text-anchor="end">step</text>')
    for curve in shown:
        if curve.kind == "dots" or len(curve.points) == 1:
            parts += [
                f'<circle class="{curve.kind}" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.5"/>' for s, v in curve.points
            ]
        elif curve.points:
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve.points)
            parts.append(f'<polyline class="{curve.kind}" points="{points}"/>')
    return f'<figure class="curve">{caption}{"".join(parts)}</svg></figure>'


def smoothed(points: Sequence[tuple[float, float]], share: float = 0.02) -> list[tuple[float, float]]:
    """Return an exponential moving average over about this share of the steps, without bias at the beginning."""
    keep = 1 - 1 / max(1.0, share * len(points))
    total, weight, averages = 0.0, 0.0, []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            averages.append((step, total / weight))
    return averages


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the least and the largest of neighbouring values, in their order."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return round values, about `count` of them, from at most `low` to at least `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(begin, end + 1)]


def _whole_ticks(first: float, last: float) -> list[float]:
    inside = [mark for mark in _ticks(first, last, 5) if first <= mark <= last and mark == round(mark)]
    return inside if len(inside) > 1 else sorted({first, last})
