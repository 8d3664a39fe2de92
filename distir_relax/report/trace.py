"""Timeline of a simulation as trace events, for https://ui.perfetto.dev.

The format is the JSON Trace Event Format. Two properties of Perfetto matter here: it identifies a track by its ``tid``
alone, so ``tid`` must be unique across processes; and it truncates times to nanoseconds, so ends are rounded as starts
are, and neighbours never overlap.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from distir_relax.simulation.class_names import class_name
from distir_relax.simulation.events import Event
from distir_relax.simulation.memory_categories import CATEGORIES
from distir_relax.simulation.op_timer import COMMUNICATION
from distir_relax.simulation.simulation import MemoryCurve, Simulation
from distir_relax.support.files import write_text

FEMTOSECONDS_PER_NANOSECOND = 10**6


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write `trace` as JSON. Raise `DistIRError` if the file cannot be written."""
    write_text(path, json.dumps(trace(simulation), separators=(",", ":")))


def trace(simulation: Simulation) -> dict[str, Any]:
    """Return the events: a process for each device class, with a track for each of its streams and for its memory.

    One device represents its class; the process's name lists them.
    """
    tracks: dict[tuple[int, int], int] = {}
    events: list[dict[str, Any]] = []
    names: list[dict[str, Any]] = []
    for event, start in simulation.events():
        for c in event.classes:
            tid = tracks.get((c, event.stream))
            if tid is None:
                tid = tracks[c, event.stream] = len(tracks) + 1
                names += [
                    _metadata("thread_name", c, tid, name=stream_name(event)),
                    _metadata("thread_sort_index", c, tid, sort_index=event.stream),
                ]
            events.append(_slice(event, start, c, tid))
    for c, (members, curve) in enumerate(zip(simulation.members, simulation.memory_curves(), strict=True)):
        names += [
            _metadata("process_name", c, 0, name=class_name(simulation, c)),
            _metadata("process_sort_index", c, 0, sort_index=int(members[0])),
        ]
        events += _memory(c, curve)
    return {"traceEvents": names + events, "displayTimeUnit": "ns"}


def stream_name(event: Event) -> str:
    """Return the name of the stream of an event."""
    return f"stream {event.op.attrs['stream']}" if event.stream else "ops in order"


def _slice(event: Event, start: int, device_class: int, tid: int) -> dict[str, Any]:
    begin, end = _nanoseconds(start), _nanoseconds(start + event.duration)
    args = {"value": ", ".join(map(str, event.op.results))}
    if event.op.location:
        args["location"] = event.op.location
    return {
        "name": event.op.name,
        "cat": "communication" if event.kind == COMMUNICATION else "compute",
        "ph": "X",
        "pid": device_class + 1,
        "tid": tid,
        "ts": _microseconds(begin),
        "dur": _microseconds(end - begin),
        "args": args,
    }


def _memory(device_class: int, curve: MemoryCurve) -> list[dict[str, Any]]:
    kinds = CATEGORIES[:-1]  # Workspace exists only within an op: the curve has none.
    return [
        {"name": "live memory", "ph": "C", "pid": device_class + 1, "ts": _microseconds(_nanoseconds(time * 1e15)),
         "args": dict(zip(kinds, split, strict=False)) | {"all": sum(split)}}
        for time, split in curve
    ]  # fmt: skip


def _metadata(event_name: str, device_class: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": event_name, "ph": "M", "pid": device_class + 1, "tid": tid, "args": args}


def _nanoseconds(femtoseconds: float) -> int:
    return round(femtoseconds / FEMTOSECONDS_PER_NANOSECOND)


def _microseconds(nanoseconds: int) -> float:
    """Convert to microseconds that truncate to the same nanoseconds."""
    value = nanoseconds / 1000
    return value if int(value * 1000.0) == nanoseconds else math.nextafter(value, math.inf)
