"""Records of ranks, and what the launcher makes of them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from distir_relax.runtime.agents import post_mortem
from distir_relax.runtime.agents.post_mortem import (
    MOST,
    RECORD,
    missing_ranks,
    positions,
    read_record,
    write_post_mortem,
)
from distir_relax.runtime.progress import Progress
from distir_relax.runtime.rank_record import record_of, write_record
from distir_relax.runtime.world import ALONE

STEPS = ["%y = linear(%x)  # model.py:3", "%z = all_reduce(%y)  # model.py:8"]


def waiting(rank: int, step: int | str, times: int = 1) -> dict[str, Any]:
    progress = Progress()
    for _ in range(times - 1):
        progress.enter(step, "all_reduce")
        progress.leave()
    progress.enter(step, "all_reduce")
    return record_of(rank, progress, STEPS)


def test_a_record_says_where_a_rank_is_and_what_its_threads_do() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait, name="reader")
    other.start()
    record = waiting(2, 1, times=3)
    over.set()
    other.join()
    assert record["position"] == f"rank 2 waits in step #1 {STEPS[1]}; it last finished step #1 {STEPS[1]}"
    assert record["collective"]["profiling_name"] == "all_reduce"
    assert (record["collective"]["collective_seq_id"], record["collective"]["state"]) == (2, "started")
    assert record["last"]["state"] == "completed"
    assert any("over.wait" in line or "in wait" in line for line in record["threads"]["reader"])
    assert any("record_of" in line for line in record["threads"]["MainThread"])
    assert 1 << 20 < record["peak_memory"] < 1 << 40
    assert json.loads(json.dumps(record)) == record


def test_ranks_that_are_not_in_the_collective_of_most_are_missing() -> None:
    records = {0: waiting(0, 1), 1: waiting(1, 1), 2: waiting(2, 1, times=2), 4: waiting(4, "the start of the run")}
    collective, missing = missing_ranks(records, range(5))
    assert (collective, missing) == (f"step #1 {STEPS[1]}", [2, 3, 4])
    lines = positions(records, range(5))
    assert lines[:2] == [f"rank {rank} waits in step #1 {STEPS[1]}" for rank in (0, 1)]
    assert lines[-1] == f"missing from step #1 {STEPS[1]}: rank 2, 3, 4"
    assert missing_ranks({0: record_of(0, Progress(), STEPS)}, [0, 1]) == ("", [])
    assert missing_ranks({}, [0, 1]) == ("", [])


@pytest.mark.parametrize(
    "odd", [{}, {"collective": 3}, {"collective": {"frame": [1]}, "position": 7}, {"position": None}]
)
def test_a_record_of_anything_breaks_nothing(
    odd: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_mortem.tempfile, "tempdir", str(tmp_path))
    records = {0: odd, 1: waiting(1, 1)}
    assert positions(records, [0, 1])
    path = write_post_mortem("rank 0 on a was stopped", {"a": [0], "b": [1, 2]}, records)
    assert path is not None
    content = json.loads(path.read_text())
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o77 == 0, "only its owner reads it"
    assert content["missing"] == {"collective": f"step #1 {STEPS[1]}", "ranks": [0, 2]}
    assert content["ranks"][2] == {"rank": 2, "position": "rank 2 left no record"}


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem.tempfile, "tempdir", str(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(post_mortem.json, "dump", full)
    assert write_post_mortem("", {"a": [0]}, {0: waiting(0, 1)}) is None
    assert list(tmp_path.iterdir()) == []


def test_a_rank_writes_its_record_to_the_file_of_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("record")
    try:
        monkeypatch.setenv(RECORD, f"/proc/self/fd/{descriptor}")
        assert read_record(descriptor) == {}
        os.pwrite(descriptor, b"x" * (MOST + 9), 0)
        assert read_record(descriptor) == {}
        write_record(ALONE)
        assert read_record(descriptor)["position"] == "rank 0 has not reached its first communication"
        for value in ("", "/nowhere/x", "/proc/self/fd/987654", "/"):
            monkeypatch.setenv(RECORD, value)
            write_record(ALONE)
    finally:
        os.close(descriptor)
