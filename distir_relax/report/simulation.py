"""What a simulation found, as JSON; names of device classes; files written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from distir_relax.analysis.simulation import Simulation
from distir_relax.errors import DistIRError
from distir_relax.units import listed


def json_text(simulation: Simulation) -> str:
    """The result as JSON text; the keys are those of `Simulation.as_json`."""
    return json.dumps(simulation.as_json())


def class_name(simulation: Simulation, number: int) -> str:
    """What to call a class of devices: ``device 3``, ``devices 0-7``, ``devices 0, 2, 4 and 5 more, at speed 0.5``."""
    members = simulation.members[number].tolist()
    speed = simulation.profile.speed_of(members[0])
    return _numbers(members) + (f", at speed {speed:g}" if speed != 1 else "")


def _numbers(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"device {members[0]}"
    if list(members) == list(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}-{members[-1]}"
    return f"devices {listed(list(map(str, members)), 3)}"


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises `DistIRError` when it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DistIRError(f"cannot be written: {error.strerror}", str(path)) from None
