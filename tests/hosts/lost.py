"""A launch on two hosts to which something happens: ``python -m tests.hosts.lost WHAT BUNDLE INPUT``, in namespaces.

Prints one line of JSON: the exit code, the seconds until the failure was named and until the launch had ended, what it
printed, the processes that are left on the hosts, and the post-mortem files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.hosts.laboratory import Laboratory, _signal

FAILURES = (
    "rank",
    "segfault",
    "stopped rank",
    "agent",
    "host",
    "stopped host",
    "cut",
    "cut one way",
    "launcher",
    "nothing",
)


def fail(laboratory: Laboratory, what: str) -> None:
    """Let something happen to the second host, or to its rank."""
    ranks = laboratory.pids_of("n1", "-m distir_relax run ")
    match what:
        case "rank":
            _signal(ranks, 9)
        case "segfault":
            _signal(ranks, 11)
        case "stopped rank":
            _signal(ranks, 19)
        case "agent":
            _signal(laboratory.pids_of("n1", "host_process"), 9)
        case "host":
            laboratory.kill("n1")
        case "stopped host":
            laboratory.stop("n1")
        case "cut":
            laboratory.cut("n1")
        case "cut one way":
            laboratory.cut_to("n1", "n0")
        case "launcher":
            _signal(laboratory.pids_of("n0", "-m distir_relax launch "), 9)


def main() -> None:
    what, bundle, given = sys.argv[1:]
    steps = "1" if what == "nothing" else "100000000"
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder)) as laboratory:
        launch = laboratory.start(
            "n0", sys.executable, "-P", "-m", "distir_relax", "launch", bundle, "--host", "n0:1,n1:1",
            "--rsh", str(laboratory.shell), "--input", given, "--repeat", steps, "--timeout", "30",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": folder},
        )  # fmt: skip
        lines: list[tuple[float, str]] = []

        def read() -> None:
            assert launch.stdout is not None
            for line in launch.stdout:
                lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        if what != "nothing":
            until = time.monotonic() + 60
            while not laboratory.pids_of("n1", "-m distir_relax run ") and time.monotonic() < until:
                time.sleep(0.2)
            # Its ranks are connected, and run.
            time.sleep(8)
        start = time.monotonic()
        fail(laboratory, what)
        try:
            code: int | None = launch.wait(40)
        except subprocess.TimeoutExpired:
            code = None
        ended = time.monotonic() - start
        time.sleep(2.5)
        reader.join(1)
        named = next((when - start for when, line in lines if "error: " in line and when > start), None)
        left = {name: [Path(f"/proc/{pid}/comm").read_text().strip() for pid in laboratory.pids(name)]
                for name in laboratory.names}  # fmt: skip
        text = [line for _, line in lines]
        written = [json.loads(path.read_text()) for path in Path(folder).glob("distir-post-mortem-*.json")]
        print(json.dumps({
            "code": code, "named": named, "ended": ended, "text": text, "left": left, "written": written,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
