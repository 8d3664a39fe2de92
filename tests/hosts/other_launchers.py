"""The commands of mpirun and torchrun over hosts, as docs/clusters.md has them.

``python -m tests.hosts.other_launchers LAUNCHER FOLDER [rank|host]``, in namespaces. The hosts have the names of the
page, and the commands run in FOLDER. If a rank on host b, or all of the host, is to be killed, they repeat the program
without end, and it is killed once ranks are connected. Prints one line of JSON: the exit code of each command, the last
lines that it printed, and the seconds from the kill to its end, and the number of ranks that were on host b.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.laboratory import Laboratory, _signal
from tests.hosts.launches import REPEATS

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
NAMES = ("a", "b")
RUNNING = 10_000
"""Bytes that host b receives in half a second once its ranks run."""


def commands(launcher: str) -> list[tuple[str, str]]:
    """Return the commands in the page's section about a launcher, each with the host that it is for."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## By {launcher} over hosts\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    lines = [line.partition("  # on ")[::2] for line in block.splitlines()]
    return [(host.strip() or NAMES[0], command) for command, host in lines]


def main() -> None:
    """Run the commands, and print the line."""
    launcher, data, kill = sys.argv[1], Path(sys.argv[2]), "".join(sys.argv[3:])
    with tempfile.TemporaryDirectory() as folder, Laboratory(Path(folder), NAMES, [data]) as laboratory:
        environment = {
            **os.environ, "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PRTE_MCA_plm_ssh_agent": str(laboratory.shell), "OMPI_MCA_mpi_yield_when_idle": "1",
        }  # fmt: skip
        more = f" --repeat {REPEATS}" * bool(kill)
        processes = {}
        for host, command in commands(launcher):
            # Tests run as root.
            command = command.replace("mpirun ", "mpirun --allow-run-as-root ", 1)
            processes[host] = laboratory.start(
                host, "sh", "-c", f"exec {command}{more}",
                cwd=data, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until, ranks = time.monotonic() + 60, list[int]()
        while time.monotonic() < until and not ranks and any(process.poll() is None for process in processes.values()):
            ranks = _connected_ranks(laboratory) if kill else _ranks(laboratory)
        if kill == "rank":
            _signal(ranks[:1], 9)
        elif kill == "host":
            laboratory.kill("b")
        ends, start = {}, time.monotonic()
        for host, process in processes.items():
            text, _ = process.communicate(timeout=90)
            lines = text.decode(errors="replace").splitlines()[-30:]
            ends[host] = {"code": process.returncode, "ended": time.monotonic() - start, "text": lines}
        print(json.dumps({"ends": ends, "ranks of b": len(ranks)}))


def _connected_ranks(laboratory: Laboratory) -> list[int]:
    """Return the ranks of host b, if they exchange messages with those of host a."""
    before = laboratory.bytes_received("b")
    time.sleep(0.5)
    is_running = laboratory.bytes_received("b") > before + RUNNING
    return _ranks(laboratory) if is_running else []


def _ranks(laboratory: Laboratory) -> list[int]:
    """Return the ranks of host b: the system runs a script by its path, which no argument of a launcher has."""
    time.sleep(0.05)
    return laboratory.pids_of("b", "/distir run ")


if __name__ == "__main__":
    main()
