"""What a simulation found, in words and as JSON; names of device classes; files written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from distir_relax.analysis.memory import CATEGORIES
from distir_relax.analysis.simulation import Simulation
from distir_relax.errors import DistIRError
from distir_relax.report.units import count, seconds, size


def summary(simulation: Simulation) -> str:
    """A few lines for a terminal."""
    s = simulation
    lines = [f"on {s.profile.name}: {seconds(s.makespan)} on {count(s.devices, 'device')}"]
    if s.throughput is not None:
        lines[0] += f", {s.throughput:,.4g} samples/s"
    compute = 1 - s.bubble - s.communication
    lines.append(f"time      compute {compute:.1%}, communication {s.communication:.1%}, idle {s.bubble:.1%}")
    if s.overlapped.any():
        lines.append(f"          beside it, streams are busy for {seconds(float(s.overlapped.mean()))} a device")
    device = int(s.peak_memory.argmax())
    peak = s.peak(device)
    parts = ", ".join(f"{name} {size(n)}" for name, n in zip(CATEGORIES, peak.split, strict=True) if n)
    verdict = "" if s.fits else f", more than the {size(s.profile.memory)} of a device"
    lines.append(f"memory    peak {size(peak.bytes)} on device {device}{verdict}: {parts}")
    lines.append(f"          at {peak}")
    return "\n".join(lines)


def json_text(simulation: Simulation) -> str:
    """The result as JSON text; the keys are those of `Simulation.as_json`."""
    return json.dumps(simulation.as_json())


def class_name(simulation: Simulation, number: int) -> str:
    """What to call a class of devices: ``device 3``, ``devices 0-7``, ``devices 0, 2, 4 and 5 more``."""
    members = simulation.members[number].tolist()
    if len(members) == 1:
        return f"device {members[0]}"
    if members == list(range(members[0], members[-1] + 1)):
        return f"devices {members[0]}-{members[-1]}"
    shown = ", ".join(map(str, members[:3]))
    return f"devices {shown}{f' and {len(members) - 3} more' if len(members) > 3 else ''}"


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises `DistIRError` when it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DistIRError(f"cannot be written: {error.strerror}", str(path)) from None
