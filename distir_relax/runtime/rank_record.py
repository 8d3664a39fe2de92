"""The record that a rank writes for its launcher when it fails or is ended: its position, and its threads' stacks."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from distir_relax.runtime.agents.post_mortem import MOST, RANK, RECORD
from distir_relax.runtime.progress import Point, Progress
from distir_relax.runtime.watchdog import Steps, describe, describe_point
from distir_relax.runtime.world import World

_FRAMES = 60


def write_record(world: World) -> None:
    """Write the record of this rank, if its launcher asks for one. It never fails, since the rank is ending."""
    path = os.environ.get(RECORD, "").replace(RANK, str(world.rank))
    if not path:
        return
    record = {**record_of(world.rank, world.progress, world.steps), "step_seconds": list(world.step_seconds)}
    text = json.dumps(record).encode()
    if len(text) > MOST:
        text = json.dumps({**record, "threads": {}}).encode()
    with suppress(OSError, ValueError):
        Path(path).write_bytes(text)


def record_of(rank: int, progress: Progress, steps: Steps) -> dict[str, Any]:
    """Return the record of a rank: its position, memory in bytes, and the stack of each thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    current, last = progress.current, progress.last
    return {
        "rank": rank,
        "host": platform.node(),
        "process": os.getpid(),
        "position": describe(rank, progress, steps),
        "collective": current and {**_collective(current, steps, "started"), "seconds": progress.waiting()},
        "last": last and _collective(last, steps, "completed"),
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
        "threads": {
            names.get(ident, str(ident)): [line.rstrip() for line in traceback.format_stack(frame, _FRAMES)]
            for ident, frame in sys._current_frames().items()
        },
    }


def _collective(point: Point, steps: Steps, state: str) -> dict[str, Any]:
    return {
        "profiling_name": point.kind, "collective_seq_id": point.time, "state": state, "step": point.step,
        "frame": describe_point(point, steps),
    }  # fmt: skip
