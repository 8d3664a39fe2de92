"""A launch on hosts to which something happens: ``python -m tests.hosts.lost CASE BUNDLE INPUT``, in namespaces.

BUNDLE has three ranks for `LINKS`, and two for others. Prints one line of JSON: the exit code, the seconds until the
failure was named and until the launch had ended, the lines that it printed, the processes that are left on the hosts,
the post-mortem files, and the files of a full disk.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.clocks import DAY, Clocks, has_compiler
from tests.hosts.laboratory import Laboratory
from tests.hosts.launches import REPEATS, Failure, Launch, inflict

# Files are younger than the clocks of n0 say, and those of the hosts are 300 days apart.
CLOCKS = {
    "n0": Clocks(wall=-100 * DAY if has_compiler() else 0),
    "n1": Clocks(monotonic=10 * DAY, wall=200 * DAY if has_compiler() else 0),
}
TRAFFIC = 100_000
"""Bytes that a host has received only if its ranks are connected and run: connecting takes a quarter of it."""

ENDING = 2.5
"""Seconds in which the processes of the hosts end after their launch."""


@dataclass(frozen=True)
class Case:
    """A launch in a laboratory with some `options`, and its failure, if any, which is there from the `start` or comes
    once its ranks run.

    `memory` is the memory of the second host in megabytes; if `is_disk_full`, the output is to go to a full disk.
    """

    failure: Failure | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: int = 0
    is_disk_full: bool = False
    start: bool = False


CASES = {
    "rank": Case(Failure("kill", "n1")),
    "segfault": Case(Failure("segfault", "n1")),
    "stopped rank": Case(Failure("stop", "n1")),
    "agent": Case(Failure("agent", "n1")),
    "host": Case(Failure("host", "n1")),
    "stopped host": Case(Failure("stop host", "n1")),
    "cut": Case(Failure("cut", "n1")),
    "cut one way": Case(Failure("cut one way", "n1")),
    "rank, other clocks": Case(Failure("kill", "n1"), {"clocks": CLOCKS}),
    "cut, slow links": Case(Failure("cut", "n1"), {"delay": 0.15e-3, "loss": 0.01}),
    "cut link": Case(Failure("cut link", "n1", which=1)),
    "cut link one way": Case(Failure("cut one way", "n1", which=1)),
    "firewall": Case(Failure("cut link", "n1", which=1), start=True),
    "launcher": Case(Failure("launcher", "n0")),
    "nothing": Case(),
    "nothing, other clocks, slow links": Case(options={"clocks": CLOCKS, "delay": 0.15e-3, "loss": 0.01}),
    "memory": Case(memory=64),
    "full disk": Case(is_disk_full=True),
}
"""Failures of the second host, of its rank, or of its link to a third one, and launches on hosts with other clocks,
links, memory or disks."""
LINKS = ("cut link", "cut link one way", "firewall")


def main() -> None:
    """Run the case, and print the line."""
    case, bundle, given = CASES[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    failure, shared = case.failure, [bundle.parent, given.parent]
    names = ("n0", "n1", "n2")[: 2 + (sys.argv[1] in LINKS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Laboratory(Path(folder), names, shared=shared, **case.options) as laboratory,
    ):
        if case.memory:
            laboratory.memory_of("n1", case.memory)
        disk = laboratory.full_disk("n0") if case.is_disk_full else None
        output, repeat = disk / "y.npz" if disk else None, REPEATS if failure else 1
        launch = Launch(laboratory, ",".join(f"{name}:1" for name in names), bundle, given, repeat, 30, output)
        if failure is not None and not case.start:
            until = time.monotonic() + 60
            while laboratory.bytes_received("n1") < TRAFFIC and time.monotonic() < until:
                time.sleep(0.1)
        start = time.monotonic()
        if failure is not None:
            inflict(laboratory, failure, launch)
        code = launch.wait(40)
        ended = time.monotonic() - start
        until = time.monotonic() + ENDING
        while time.monotonic() < until and any(laboratory.pids(name) for name in laboratory.names):
            time.sleep(0.1)
        text = launch.text()
        named = next((when - start for when, line in launch.lines if "error: " in line and when > start), None)
        left = {name: [Path(f"/proc/{pid}/comm").read_text().strip() for pid in laboratory.pids(name)]
                for name in laboratory.names}  # fmt: skip
        written = [json.loads(path.read_text()) for path in Path(folder).glob("distir-post-mortem-*.json")]
        print(json.dumps({
            "code": code, "named": named, "ended": ended, "text": text, "left": left, "written": written,
            "disk": sorted(os.listdir(f"{laboratory.hosts['n0'].root}{disk}")) if disk else [],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
