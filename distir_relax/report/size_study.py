"""Predicted time and memory over a range of one symbolic size: a table, and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from distir_relax.report.text_table import align_columns
from distir_relax.simulation.simulation import Simulation
from distir_relax.support.files import write_text
from distir_relax.support.units import rate, seconds, size

_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL = 400.0, 260.0, 84.0, 40.0, 520.0
_STYLE = (
    "text{fill:#222}.frame,.grid{stroke:#888;fill:none}.grid{opacity:.35}.line{stroke:#0072b2;fill:none;stroke-width:2}"
    ".dot{fill:#0072b2}.ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.ground{fill:#151515}.line{stroke:#56b4e9}.dot{fill:#56b4e9}}"
)


@dataclass(frozen=True)
class SizeStudy:
    """Simulations of a program for several `sizes` of the symbol `name`."""

    name: str
    sizes: Sequence[int]
    results: Sequence[Simulation]

    def __str__(self) -> str:
        """Return a table: time of a step, samples per second, and the largest peak of memory, for each size."""
        rows = [(self.name, "time", "throughput", "memory peak", "")]
        for number, result in zip(self.sizes, self.results, strict=True):
            peak, fits = float(result.peak_memory.max()), "" if result.fits else "does not fit"
            throughput = "" if result.throughput is None else rate(result.throughput)
            rows.append((str(number), seconds(result.makespan), throughput, size(peak), fits))
        return "\n".join(align_columns(rows))

    def as_json(self) -> list[dict[str, Any]]:
        """Return the results, each with its size by name."""
        pairs = zip(self.sizes, self.results, strict=True)
        return [{self.name: number, **result.as_json()} for number, result in pairs]


def write_size_plot(study: SizeStudy, path: Path) -> None:
    """Write plots of time and memory over the size as SVG. Raises `DistIRError` if the file cannot be written."""
    write_text(path, size_plot(study))


def size_plot(study: SizeStudy) -> str:
    """Return the plots as SVG, on logarithmic axes."""
    times = [result.makespan for result in study.results]
    peaks = [float(result.peak_memory.max()) for result in study.results]
    panels = [_panel(study, "time of a step", times, seconds), _panel(study, "memory peak of a device", peaks, size)]
    width, height = _PANEL * len(panels), _HEIGHT + 110
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        'font-size="12">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width:.0f}" height="{height:.0f}"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * _PANEL:.0f} 0)">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(study: SizeStudy, title: str, values: Sequence[float], to_text: Callable[[float], str]) -> list[str]:
    positive = [value for value in values if value > 0] or [1.0]
    x = _axis(max(1, min(study.sizes)), max(2, *study.sizes), _LEFT, _WIDTH)
    low, high = min(positive), max(positive)
    y = _axis(low / 1.1, max(high * 1.1, low * 1.3), _TOP + _HEIGHT, -_HEIGHT)
    points = [(x(max(1, n)), y(max(low, v))) for n, v in zip(study.sizes, values, strict=True)]
    parts = [
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text x="{_LEFT}" y="26" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 44}" text-anchor="middle">{escape(study.name)}</text>',
    ]
    step = max(1, math.ceil(len(study.sizes) / 8))
    for number in study.sizes[::step]:
        at = x(max(1, number))
        parts += [
            f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_TOP + _HEIGHT}"/>',
            f'<text x="{at:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{number}</text>',
        ]
    for value in _ticks(low, high):
        at = y(value)
        parts += [
            f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + _WIDTH}" y2="{at:.1f}"/>',
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(to_text(value))}</text>',
        ]
    parts.append(f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
    for (a, b), number, value in zip(points, study.sizes, values, strict=True):
        label = f"{study.name} = {number}: {to_text(value)}"
        parts.append(f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3.5"><title>{escape(label)}</title></circle>')
    return parts


def _axis(low: float, high: float, start: float, length: float) -> Callable[[float], float]:
    """Return a logarithmic axis from `low` to `high`, drawn from `start` over `length`."""
    span = math.log(high / low) or 1.0
    return lambda value: start + length * math.log(value / low) / span


def _ticks(low: float, high: float) -> list[float]:
    """Return five values from low to high, at equal distances on a logarithmic axis."""
    return [low * (high / low) ** (index / 4) for index in range(5)] if high > low else [low]
