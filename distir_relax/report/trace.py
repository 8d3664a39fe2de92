"""The time line of a simulation as trace events, which https://ui.perfetto.dev opens.

The format is the JSON of the Trace Event Format. Perfetto reads it with two habits of its own, which are met here: a
track is known by its ``tid`` alone, so that no two processes may share one; times are microseconds of which whatever
is below a nanosecond is cut off, so that ends are rounded as starts are and neighbours never overlap.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from distir_relax.analysis.class_names import class_name
from distir_relax.analysis.memory_categories import CATEGORIES
from distir_relax.analysis.op_timer import COMMUNICATION
from distir_relax.analysis.simulation import Event, MemoryCurve, Simulation
from distir_relax.support.files import write_text

FEMTOSECONDS_PER_NANOSECOND = 10**6


def write_trace(simulation: Simulation, path: Path) -> None:
    """Write `trace` as JSON. Raises `DistIRError` when the file cannot be written."""
    write_text(path, json.dumps(trace(simulation), separators=(",", ":")))


def trace(simulation: Simulation) -> dict[str, Any]:
    """The time line: a process for each class of devices, with a track for each of its streams and for its memory.

    One device stands for those that do the same; the process's name says which.
    """
    tracks: dict[tuple[int, int], int] = {}
    found: list[dict[str, Any]] = []
    names: list[dict[str, Any]] = []
    for event, start in simulation.events():
        for c in event.classes:
            tid = tracks.get((c, event.stream))
            if tid is None:
                tid = tracks[c, event.stream] = len(tracks) + 1
                names += [
                    _named("thread_name", c, tid, name=stream_name(event)),
                    _named("thread_sort_index", c, tid, sort_index=event.stream),
                ]
            found.append(_slice(event, start, c, tid))
    for c, (members, curve) in enumerate(zip(simulation.members, simulation.memory_curves(), strict=True)):
        names += [
            _named("process_name", c, 0, name=class_name(simulation, c)),
            _named("process_sort_index", c, 0, sort_index=int(members[0])),
        ]
        found += _memory(c, curve)
    return {"traceEvents": names + found, "displayTimeUnit": "ns"}


def stream_name(event: Event) -> str:
    """What to call the stream that an event lies on."""
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
    kinds = CATEGORIES[:-1]  # Workspace lives only inside an op: the curve has none.
    return [
        {"name": "live memory", "ph": "C", "pid": device_class + 1, "ts": _microseconds(_nanoseconds(time * 1e15)),
         "args": dict(zip(kinds, split, strict=False)) | {"all": sum(split)}}
        for time, split in curve
    ]  # fmt: skip


def _named(what: str, device_class: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": device_class + 1, "tid": tid, "args": args}


def _nanoseconds(femtoseconds: float) -> int:
    return round(femtoseconds / FEMTOSECONDS_PER_NANOSECOND)


def _microseconds(nanoseconds: int) -> float:
    """Microseconds that are these nanoseconds once multiplied by 1000 and cut off."""
    found = nanoseconds / 1000
    return found if int(found * 1000.0) == nanoseconds else math.nextafter(found, math.inf)
