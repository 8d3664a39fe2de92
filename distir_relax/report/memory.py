"""Memory curves of the report page: live bytes of each device class, by category, with the peak."""

from __future__ import annotations

from typing import Any

from distir_relax.simulation.class_names import class_name, shown_classes
from distir_relax.simulation.memory_categories import CATEGORIES, WORKSPACE
from distir_relax.simulation.simulation import MemoryCurve, Peak, Simulation
from distir_relax.support.units import size

CHARTS = 8
"""Maximum number of device classes with a chart."""

POINTS = 600
"""Maximum number of points per curve."""


def memory_charts(simulation: Simulation) -> list[dict[str, Any]]:
    """Return the data of the page's script for each class shown: points (seconds, bytes by category) and the peak."""
    curves = simulation.memory_curves()
    return [
        {
            **_chart(class_name(simulation, c), curves[c], simulation.peaks[c], simulation.makespan),
            "room": float(simulation.memory[simulation.members[c][0]]),
        }
        for c in shown_classes(simulation, CHARTS)
    ]


def downsample(curve: MemoryCurve, end: float, limit: int = POINTS) -> MemoryCurve:
    """Reduce a curve to at most `limit` points: the highest and the last one of equal intervals of time."""
    if len(curve) <= limit:
        return curve
    intervals: dict[int, tuple[int, int]] = {}
    count = limit // 2
    for i, (time, split) in enumerate(curve):
        index = min(int(time / end * count), count - 1) if end else 0
        highest = intervals.get(index, (i, i))[0]
        intervals[index] = (i if sum(split) > sum(curve[highest][1]) else highest, i)
    return [curve[i] for pair in intervals.values() for i in sorted(set(pair))]


def peak_time(curve: MemoryCurve, peak: Peak) -> float:
    """Return the time of a curve's peak, in seconds. Workspace is part of a peak but not of the curve."""
    without_workspace = [n for i, n in enumerate(peak.split) if i != WORKSPACE]
    for time, split in curve:
        if [n for i, n in enumerate(split) if i != WORKSPACE] == without_workspace:
            return time
    return max(curve, key=lambda point: sum(point[1]), default=(0.0, ()))[0]


def _chart(name: str, curve: MemoryCurve, peak: Peak, end: float) -> dict[str, Any]:
    parts = ", ".join(f"{kind} {size(n)}" for kind, n in zip(CATEGORIES, peak.split, strict=True) if n)
    return {
        "name": name,
        "points": [[time, *split[:WORKSPACE]] for time, split in downsample(curve, end)],
        "peak": [peak_time(curve, peak), peak.bytes],
        "text": f"peak {size(peak.bytes)} at {peak}" + (f": {parts}" if parts else ""),
    }
