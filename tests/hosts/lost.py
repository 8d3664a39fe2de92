"""A launch on hosts to which something happens: ``python -m tests.hosts.lost WHAT BUNDLE INPUT``, in namespaces.

BUNDLE has three ranks for `LINKS`, and two for others. Prints one line of JSON: the exit code, the seconds until the
failure was named and until the launch had ended, what it printed, the processes that are left on the hosts, and the
post-mortem files.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.laboratory import Laboratory
from tests.hosts.launches import RANK, REPEATS, Failure, Launch, inflict

FAILURES = {
    "rank": Failure("kill", "n1"),
    "segfault": Failure("segfault", "n1"),
    "stopped rank": Failure("stop", "n1"),
    "agent": Failure("agent", "n1"),
    "host": Failure("host", "n1"),
    "stopped host": Failure("stop host", "n1"),
    "cut": Failure("cut", "n1"),
    "cut one way": Failure("cut one way", "n1"),
    "cut link": Failure("cut link", "n1", which=1),
    "cut link one way": Failure("cut one way", "n1", which=1),
    "firewall": Failure("cut link", "n1", which=1),
    "launcher": Failure("launcher", "n0"),
    "nothing": None,
}
"""What happens to the second host, to its rank, or to its link to a third one; a firewall is there from the start."""
LINKS = ("cut link", "cut link one way", "firewall")


def main() -> None:
    what, bundle, given = sys.argv[1:]
    failure = FAILURES[what]
    names = ("n0", "n1", "n2") if what in LINKS else ("n0", "n1")
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), names) as laboratory:
        hosts, repeats = ",".join(f"{name}:1" for name in names), 1 if failure is None else REPEATS
        launch = Launch(laboratory, hosts, Path(bundle), Path(given), repeats, 30)
        if failure is not None and what != "firewall":
            until = time.monotonic() + 60
            while not laboratory.pids_of("n1", RANK) and time.monotonic() < until:
                time.sleep(0.2)
            # Its ranks are connected, and run.
            time.sleep(8)
        start = time.monotonic()
        if failure is not None:
            inflict(laboratory, failure, launch)
        code = launch.wait(40)
        ended = time.monotonic() - start
        time.sleep(2.5)
        text = launch.text()
        named = next((when - start for when, line in launch.lines if "error: " in line and when > start), None)
        left = {name: [Path(f"/proc/{pid}/comm").read_text().strip() for pid in laboratory.pids(name)]
                for name in laboratory.names}  # fmt: skip
        written = [json.loads(path.read_text()) for path in Path(folder).glob("distir-post-mortem-*.json")]
        print(json.dumps({
            "code": code, "named": named, "ended": ended, "text": text, "left": left, "written": written,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
