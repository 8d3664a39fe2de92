"""The live-memory curves as the report page draws them: for each class of devices, by category, with the peak."""

from __future__ import annotations

from typing import Any

from distir_relax.analysis.class_names import class_name, shown_classes
from distir_relax.analysis.memory_categories import CATEGORIES, WORKSPACE
from distir_relax.analysis.simulation import MemoryCurve, Peak, Simulation
from distir_relax.support.units import size

CHARTS = 8
"""How many classes of devices have a chart."""

POINTS = 600
"""How many points a curve has at most."""


def memory_charts(simulation: Simulation) -> list[dict[str, Any]]:
    """What the page's script draws for each class shown: points (seconds, bytes by category) and the peak."""
    curves = simulation.memory_curves()
    return [
        {
            **_chart(class_name(simulation, c), curves[c], simulation.peaks[c], simulation.makespan),
            "room": float(simulation.memory[simulation.members[c][0]]),
        }
        for c in shown_classes(simulation, CHARTS)
    ]


def thinned(curve: MemoryCurve, end: float, limit: int = POINTS) -> MemoryCurve:
    """A curve of no more than `limit` points: of equal stretches of time, the highest point and the last one."""
    if len(curve) <= limit:
        return curve
    stretches: dict[int, tuple[int, int]] = {}
    count = limit // 2
    for i, (time, split) in enumerate(curve):
        place = min(int(time / end * count), count - 1) if end else 0
        highest = stretches.get(place, (i, i))[0]
        stretches[place] = (i if sum(split) > sum(curve[highest][1]) else highest, i)
    return [curve[i] for pair in stretches.values() for i in sorted(set(pair))]


def peak_time(curve: MemoryCurve, peak: Peak) -> float:
    """When a curve is at its peak, in seconds. Workspace is part of a peak and not of the curve."""
    held = [n for i, n in enumerate(peak.split) if i != WORKSPACE]
    for time, split in curve:
        if [n for i, n in enumerate(split) if i != WORKSPACE] == held:
            return time
    return max(curve, key=lambda point: sum(point[1]), default=(0.0, ()))[0]


def _chart(name: str, curve: MemoryCurve, peak: Peak, end: float) -> dict[str, Any]:
    parts = ", ".join(f"{kind} {size(n)}" for kind, n in zip(CATEGORIES, peak.split, strict=True) if n)
    return {
        "name": name,
        "points": [[time, *split[:WORKSPACE]] for time, split in thinned(curve, end)],
        "peak": [peak_time(curve, peak), peak.bytes],
        "text": f"peak {size(peak.bytes)} at {peak}" + (f": {parts}" if parts else ""),
    }
