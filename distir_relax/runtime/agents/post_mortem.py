"""What is known of the ranks of a launch that has failed: where each was, and which are missing from a collective.

Each rank writes a record (`distir_relax.runtime.rank_record`) to the file that the variable `RECORD` names; `RANK` in
it stands for the rank. The launcher collects the records. Fields of a collective have the names of torch's flight
recorder.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

RECORD = "DISTIR_RECORD"
RANK = "{rank}"
MOST = 1 << 18
"""Maximum length of a record in bytes."""
Record = Mapping[str, Any]


def read_record(file: int | Path) -> dict[str, Any]:
    """Return the record that a rank has written to a file, open or by its path; an empty one if there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(os.pread(file, MOST + 1, 0) if isinstance(file, int) else file.read_bytes()[: MOST + 1])
        if isinstance(found, dict):
            return found
    return {}


def missing_ranks(records: Mapping[int, Record], ranks: Sequence[int]) -> tuple[str, list[int]]:
    """Return the collective in which most ranks wait, and the ranks that are not known to wait in it; "" if none do."""
    waiting = Counter(filter(None, (_waits_in(records.get(rank, {})) for rank in ranks)))
    if not waiting:
        return "", []
    most = max(waiting, key=lambda point: (waiting[point], point))
    return most[0], [rank for rank in ranks if _waits_in(records.get(rank, {})) != most]


def positions(records: Mapping[int, Record], ranks: Sequence[int], most: int = 8) -> list[str]:
    """Return lines for people: where each rank was, of the first `most`, and which are missing from a collective."""
    lines = [str(records[rank].get("position", "")) for rank in ranks if rank in records][:most]
    collective, missing = missing_ranks(records, ranks)
    if missing:
        lines.append(f"missing from {collective}: rank {', '.join(map(str, missing[:most]))}")
    return lines


def write_post_mortem(failure: str, hosts: Mapping[str, Sequence[int]], records: Mapping[int, Record]) -> Path | None:
    """Write the file of a launch to the folder of temporary files; return its path, None if it cannot be written.

    `hosts` are the ranks of each host, `failure` is the one that ended the launch.
    """
    ranks = [rank for theirs in hosts.values() for rank in theirs]
    collective, missing = missing_ranks(records, ranks)
    content = {
        "failure": failure,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hosts": {name: list(theirs) for name, theirs in hosts.items()},
        "missing": {"collective": collective, "ranks": missing},
        "ranks": [records.get(rank, {"rank": rank, "position": f"rank {rank} left no record"}) for rank in ranks],
    }
    path = None
    try:
        descriptor, name = tempfile.mkstemp(prefix="distir-post-mortem-", suffix=".json")
        path = Path(name)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except OSError:
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path


def _waits_in(record: Record) -> tuple[str, str] | None:
    """Return the collective in which a rank waits, and which execution of it. A record may hold anything."""
    collective = record.get("collective")
    if not isinstance(collective, dict):
        return None
    return str(collective.get("frame")), str(collective.get("collective_seq_id"))
