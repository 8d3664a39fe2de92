"""Names of device classes, and selection of the classes that a report shows."""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.simulation.simulation import Simulation
from distir_relax.support.units import listed


def class_name(simulation: Simulation, number: int) -> str:
    """Return the name of a class: ``device 3``, ``devices 0-7``, ``devices 0, 2, 4 and 5 more, at speed 0.5``."""
    members = simulation.members[number].tolist()
    speed = simulation.profile.speed_of(members[0])
    return _numbers(members) + (f", at speed {speed:g}" if speed != 1 else "")


def shown_classes(simulation: Simulation, limit: int) -> list[int]:
    """Return the device classes to show, sorted by first device: all, or `limit` of them at equal distances.

    The class with the highest memory peak is always included.
    """
    classes = sorted(range(len(simulation.members)), key=lambda c: int(simulation.members[c][0]))
    if len(classes) <= limit:
        return classes
    shown = {classes[i * len(classes) // limit] for i in range(limit)}
    highest = max(classes, key=lambda c: simulation.peaks[c].bytes)
    if highest not in shown:
        shown.remove(max(shown, key=classes.index))
        shown.add(highest)
    return [c for c in classes if c in shown]


def _numbers(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"device {members[0]}"
    if list(members) == list(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}-{members[-1]}"
    return f"devices {listed(list(map(str, members)), 3)}"
