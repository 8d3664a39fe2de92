"""Launches on hosts of the laboratory, and what may happen to them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.laboratory import Laboratory, _signal
from tests.training import data

REPEATS = 100_000_000
"""Calls of a launch that runs until something happens."""
AGENT = "host_process"
DATA = Path(data.__file__)
KINDS = (
    "kill", "segfault", "stop", "interrupt", "agent", "host", "stop host", "cut", "cut one way", "slow", "held",
    "launcher",
)  # fmt: skip


PRESENT = 20.0
"""Seconds to wait for a process to which something can happen: a server goes on without ranks behind a cut link."""


@dataclass(frozen=True)
class Failure:
    """Something that happens to a host, or to one of its ranks, `after` seconds after the one before."""

    kind: str
    host: str
    after: float = 0.0
    which: int = 0

    def other(self, names: Sequence[str]) -> str:
        """The other host that a cut concerns."""
        others = [name for name in names if name != self.host]
        return others[self.which % len(others)]


class Launch:
    """`distir launch --host` of a bundle from the host n0; `lines` are what it has printed, each with its moment."""

    rank, launcher = "-m distir_relax run ", "-m distir_relax launch "
    """Parts of the command lines of a rank and of the launcher."""

    def __init__(
        self,
        laboratory: Laboratory,
        hosts: str,
        bundle: Path,
        given: Path,
        repeat: int,
        timeout: int,
        output: Path | None = None,
    ) -> None:
        options = ["--rsh", laboratory.shell, "--input", given, "--repeat", repeat, "--timeout", timeout]
        options += ["--output", output] if output else []
        self._begin(laboratory, "launch", bundle, "--host", hosts, *options)

    def _begin(self, laboratory: Laboratory, *arguments: object) -> None:
        self.process = laboratory.start(
            "n0", sys.executable, "-P", "-m", "distir_relax", *map(str, arguments),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(laboratory.folder)},
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, limit: float) -> int | None:
        """Return the exit code; None if it still runs after `limit` seconds."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None

    def wait_until_it_runs(self) -> None:
        """Wait until it has something to lose."""

    def wait_for(self, start: str, limit: float = 60.0) -> str:
        """Wait for a line that begins with `start`; return it, or nothing if it ends or the limit passes before."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            is_over = self.process.poll() is not None
            lines = self.text() if is_over else [line for _, line in self.lines]
            if found := [line for line in lines if line.startswith(start)]:
                return found[0]
            if is_over:
                break
            time.sleep(0.02)
        return ""

    def text(self) -> list[str]:
        """What it has printed until its end, or at most two seconds from now."""
        self._reader.join(2)
        return [line for _, line in self.lines]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))


@dataclass(frozen=True)
class Training:
    """A training of a bundle to a number of `steps`, with its checkpoints and its log in a `folder`."""

    bundle: Path
    folder: Path
    steps: int
    every: int

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "ck"

    @property
    def log(self) -> Path:
        """The log, with the loss of each step."""
        return self.folder / "log.csv"

    def losses(self) -> list[tuple[int, float]]:
        """The steps of the log, and their losses."""
        with self.log.open(encoding="utf-8") as file:
            return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


class TrainingLaunch(Launch):
    """`distir train --host` from the host n0, on a kind of `batches` in `tests.training.data`."""

    launcher = "-m distir_relax train --host "

    def __init__(
        self, laboratory: Laboratory, hosts: str, training: Training, batches: str, timeout: int, resume: str = ""
    ) -> None:
        options = {
            "data": f"{DATA}:{batches}", "steps": training.steps, "checkpoint": training.checkpoints,
            "every": training.every, "log": training.log, "timeout": timeout, "rsh": laboratory.shell,
        }  # fmt: skip
        more = [part for name, value in options.items() for part in (f"--{name}", value)]
        more += ["--resume", resume] * bool(resume)
        self.rank = f"-m distir_relax train {training.bundle} --data "
        self._begin(laboratory, "train", "--host", hosts, training.bundle, *more)

    def wait_until_it_runs(self) -> None:
        """Wait for the first checkpoint."""
        self.wait_for("wrote ")


class ServingLaunch(Launch):
    """`distir serve --hosts` from the host n0, and a client there that asks it again and again.

    `answers` are the client's, each with its moment.
    """

    rank, launcher = "process_session.rank_server ", "-m distir_relax serve "

    def __init__(self, laboratory: Laboratory, hosts: str, bundle: Path) -> None:
        self._laboratory = laboratory
        self._client: subprocess.Popen[bytes] | None = None
        self.answers: list[tuple[float, dict[str, Any]]] = []
        self._begin(laboratory, "serve", bundle, "--hosts", hosts, "--rsh", laboratory.shell, "--port", 0)

    def ask(self) -> bool:
        """Start the client once the server listens; return whether it does."""
        address = self.wait_for("http://")
        if address:
            self._client = self._laboratory.start(
                "n0", sys.executable, "-m", "tests.hosts.clients", address, stdout=subprocess.PIPE
            )
            threading.Thread(target=self._hear, args=(self._client,), daemon=True).start()
        return bool(address)

    def end_client(self) -> None:
        """Kill the client, which may not be in the host's namespaces yet."""
        if self._client is not None:
            self._client.kill()
            self._client.wait()

    def wait_until_it_runs(self) -> None:
        """Wait for the first answer."""
        if self.ask():
            self.wait_for_answer(200, 0.0, 60.0)

    def wait_for_answer(self, status: int, after: float, limit: float) -> bool:
        """Wait for an answer with a status to a request later than a moment; return whether there is one."""
        until = time.monotonic() + limit
        while time.monotonic() < until and self.process.poll() is None:
            if any(moment - found["seconds"] > after and found["status"] == status for moment, found in self.answers):
                return True
            time.sleep(0.02)
        return False

    def _hear(self, client: subprocess.Popen[bytes]) -> None:
        assert client.stdout is not None
        for line in client.stdout:
            self.answers.append((time.monotonic(), json.loads(line)))


def inflict(laboratory: Laboratory, failure: Failure, launch: Launch) -> None:
    """Let it happen, once there is a process to which it can; or nothing, if the launch ends before."""
    host, numbers = failure.host, {"kill": 9, "segfault": 11, "stop": 19, "interrupt": 2}
    # A host without processes has nothing to lose.
    of_agent = ("agent", "host", "stop host")
    words = launch.rank if failure.kind in (*numbers, "held") else AGENT if failure.kind in of_agent else ""
    until = time.monotonic() + PRESENT
    while words and launch.process.poll() is None and not laboratory.pids_of(host, words) and time.monotonic() < until:
        time.sleep(0.05)
    ranks = laboratory.pids_of(host, launch.rank)
    one = ranks[failure.which % len(ranks) :][:1] if ranks else []
    match failure.kind:
        case "agent":
            _signal(laboratory.pids_of(host, AGENT), 9)
        case "host":
            laboratory.kill(host)
        case "stop host":
            laboratory.stop(host)
        case "cut":
            laboratory.cut(host)
        case "cut one way":
            laboratory.cut_to(host, failure.other(laboratory.names))
        case "cut link":
            other = failure.other(laboratory.names)
            laboratory.cut_to(host, other)
            laboratory.cut_to(other, host)
        case "slow":
            laboratory.rate(host, "200kbit")
        case "full disk":
            laboratory.fill_disk()
        case "held":
            # Stopped for less than a second, as by a debugger, or a machine that is moved.
            pids = laboratory.pids_of(host, launch.rank)
            _signal(pids, 19)
            time.sleep(0.5)
            _signal(pids, 18)
        case "launcher":
            _signal(laboratory.pids_of("n0", launch.launcher), 9)
        case kind:
            _signal(one, numbers[kind])
