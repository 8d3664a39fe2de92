"""What a simulation found, in words, as JSON, and as a time line for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distir_relax.analysis.memory import CATEGORIES
from distir_relax.analysis.simulation import Simulation
from distir_relax.analysis.work import COMMUNICATION, FEMTOSECONDS
from distir_relax.errors import DistIRError


def summary(simulation: Simulation) -> str:
    """A few lines for a terminal."""
    s = simulation
    lines = [f"on {s.profile.name}: {_seconds(s.makespan)} on {_count(s.devices, 'device')}"]
    if s.throughput is not None:
        lines[0] += f", {s.throughput:,.4g} samples/s"
    lines.append(
        f"time      compute {1 - s.bubble - s.communication:.1%}, communication {s.communication:.1%}, idle {s.bubble:.1%}"
    )
    if s.overlapped.any():
        lines.append(f"          beside it, streams are busy for {_seconds(float(s.overlapped.mean()))} a device")
    device = int(s.peak_memory.argmax())
    peak = s.peak(device)
    parts = ", ".join(f"{name} {_bytes(n)}" for name, n in zip(CATEGORIES, peak.split, strict=True) if n)
    verdict = "" if s.fits else f", more than the {_bytes(s.profile.memory)} of a device"
    lines.append(f"memory    peak {_bytes(peak.bytes)} on device {device}{verdict}: {parts}")
    lines.append(f"          at {peak}")
    return "\n".join(lines)


def json_text(simulation: Simulation) -> str:
    """The result as JSON text; the keys are those of `Simulation.as_json`."""
    return json.dumps(simulation.as_json())


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write the time line as trace events, which https://ui.perfetto.dev opens: a track for each device and stream.

    One device stands for those that do the same; its name says which. Raises `DistIRError` when it cannot be written.
    """
    events: list[dict[str, Any]] = []
    streams: set[tuple[int, int]] = set()
    for event, start in simulation.events():
        for c in event.classes:
            streams.add((c, event.stream))
            shown: dict[str, Any] = {
                "name": event.op.name,
                "cat": "communication" if event.kind == COMMUNICATION else "compute",
                "ph": "X",
                "pid": c,
                "tid": event.stream,
                "ts": start / FEMTOSECONDS * 1e6,
                "dur": event.duration / FEMTOSECONDS * 1e6,
                "args": {"value": ", ".join(map(str, event.op.results))},
            }
            if event.op.location:
                shown["args"]["location"] = event.op.location
            events.append(shown)
    for c, stream in sorted(streams):
        name = "ops in order" if stream == 0 else f"stream {stream}"
        events.append({"name": "thread_name", "ph": "M", "pid": c, "tid": stream, "args": {"name": name}})
    for c in sorted({c for c, _ in streams}):
        events.append({"name": "process_name", "ph": "M", "pid": c, "args": {"name": class_name(simulation, c)}})
        events += _memory(simulation, c)
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


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


def _memory(simulation: Simulation, number: int) -> list[dict[str, Any]]:
    device = int(simulation.members[number][0])
    return [
        {"name": "live memory", "ph": "C", "pid": number, "ts": time * 1e6,
         "args": {name: n for name, n in zip(CATEGORIES, split, strict=True) if name != "workspace"}}
        for time, split in simulation.memory_curve(device)
    ]  # fmt: skip


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


def _bytes(value: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
