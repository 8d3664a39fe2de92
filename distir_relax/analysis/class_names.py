"""Names of device classes, and which of many classes a report shows."""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.analysis.simulation import Simulation
from distir_relax.support.units import listed


def class_name(simulation: Simulation, number: int) -> str:
    """What to call a class of devices: ``device 3``, ``devices 0-7``, ``devices 0, 2, 4 and 5 more, at speed 0.5``."""
    members = simulation.members[number].tolist()
    speed = simulation.profile.speed_of(members[0])
    return _numbers(members) + (f", at speed {speed:g}" if speed != 1 else "")


def shown_classes(simulation: Simulation, limit: int) -> list[int]:
    """The classes of devices that a page shows, by their first device: all, or `limit` of them at equal distances.

    The class with the highest peak of memory is always there.
    """
    ordered = sorted(range(len(simulation.members)), key=lambda c: int(simulation.members[c][0]))
    if len(ordered) <= limit:
        return ordered
    chosen = {ordered[i * len(ordered) // limit] for i in range(limit)}
    highest = max(ordered, key=lambda c: simulation.peaks[c].bytes)
    if highest not in chosen:
        chosen.remove(max(chosen, key=ordered.index))
        chosen.add(highest)
    return [c for c in ordered if c in chosen]


def _numbers(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"device {members[0]}"
    if list(members) == list(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}-{members[-1]}"
    return f"devices {listed(list(map(str, members)), 3)}"
