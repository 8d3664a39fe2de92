"""Launches on hosts to which something happens at a random moment: ``python -m tests.hosts.chaos FOLDER FIRST COUNT``.

Run in namespaces. FOLDER has ``RANKS.dist`` for 2 to 5 ranks and ``x.npz``. Prints a line of JSON for each seed: what
happened, how the launch ended and after how many seconds, and what is wrong with that, if anything. A seed draws hosts,
ranks, one or two failures, and their moments: while hosts are connected, while ranks start, or while they run. In some
seeds the disk is filled, too, clocks of a host are days apart from those of others, or links have a delay and losses.

Of five seeds one is a training, of ``train-RANKS.dist``, with checkpoints; every second of these has written one before
the first failure. After its end it resumes on the same hosts, and must finish with the losses in ``losses-RANKS.json``,
those of an undisturbed training. Another serves ``serve-RANKS.dist`` to a client, every second before the first failure
already. Once hosts and links are in order again, it must answer again, and all answers be those in ``text-RANKS.txt``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distir_relax.checkpoints import saved_steps
from tests.hosts.clocks import DAY, Clocks, has_compiler
from tests.hosts.laboratory import Laboratory, _signal
from tests.hosts.launches import (
    KINDS,
    REPEATS,
    Failure,
    Launch,
    ServingLaunch,
    Training,
    TrainingLaunch,
    inflict,
)
from tests.hosts.shell import run as run_command

NAMES = (
    "was killed by", "crashed: ", "was stopped", "was lost: ", "has not answered for", "has not heard of ",
    "was not reached", "ended with exit code", "interrupted", "No space left on device",
)  # fmt: skip
HARMLESS = ("slow", "held")
FULL_DISK = "full disk"
DISK = "32m"
"""The disk of temporary files, checkpoints and logs."""
TIMEOUT = 10
CONNECTING, ENDING = 66.0, 9.0
"""Seconds in which a launch ends if its hosts are not connected, and if they are."""
STEPS, EVERY = 600, 10
"""Steps of a training, which on slow batches outlasts all failures, and steps between its checkpoints."""
RESUMED = 90.0
"""Seconds in which a resumed training has made all steps, on batches that are not slow, or a server answers again."""
ANSWERED = 15.0
"""Seconds in which a request is answered, or refused with a reason."""
FAILED = "the engine failed and is started again: "
CLOSE = 1e-6
"""Relative difference of losses: threads add gradients in another order than hosts."""


def kind_of(seed: int) -> str:
    """Return what a seed runs: "calls", "serving" or "training"."""
    return {3: "serving", 4: "training"}.get(seed % 5, "calls")


def drawn(seed: int) -> tuple[list[int], list[Failure]]:
    """The ranks of each host, and what happens."""
    generator = random.Random(seed)
    slots = [1] * generator.randint(2, 4)
    for _ in range(generator.randint(0, 5 - len(slots))):
        slots[generator.randrange(len(slots))] += 1
    failures = []
    for number in range(generator.choice((1, 1, 2))):
        after = generator.uniform(0.0, 14.0) if number == 0 else generator.uniform(0.0, 1.5)
        host = f"n{generator.randrange(len(slots))}"
        failures.append(Failure(generator.choice(KINDS), host, after, generator.randrange(8)))
    around = _around(seed)
    if around.random() < 0.15:
        failures.insert(0, Failure(FULL_DISK, "n0", around.uniform(0.0, 6.0)))
    return slots, failures


def surroundings(seed: int) -> dict[str, Any]:
    """The clocks and links of the hosts, as options of a laboratory."""
    generator, found = _around(f"hosts of {seed}"), {}
    if generator.random() < 0.2:
        wall = generator.uniform(-200, 200) * DAY if has_compiler() else 0
        found["clocks"] = {generator.choice(("n0", "n1")): Clocks(int(generator.uniform(0, 10) * DAY), int(wall))}
    if generator.random() < 0.2:
        found.update(delay=generator.uniform(0.1e-3, 1e-3), loss=generator.choice((0.0, 0.002)), seed=seed)
    return found


def _around(seed: object) -> random.Random:
    return random.Random(f"around {seed}")


def run(seed: int, folder: Path) -> dict[str, object]:
    """Run a seed; `wrong` says what is wrong with its end."""
    slots, failures = drawn(seed)
    names = tuple(f"n{number}" for number in range(len(slots)))
    hosts = ",".join(f"{name}:{count}" for name, count in zip(names, slots, strict=True))
    around, is_full = surroundings(seed), any(failure.kind == FULL_DISK for failure in failures)
    with (
        tempfile.TemporaryDirectory() as own,
        _disk(Path(own)),
        Laboratory(Path(own), names, [folder], **around) as laboratory,
    ):
        training = Training(folder / f"train-{sum(slots)}.dist", Path(own), STEPS, EVERY)
        # A training is to reach its first checkpoint on a busy machine, too.
        launch: Launch
        if kind_of(seed) == "training":
            launch = TrainingLaunch(laboratory, hosts, training, "slow", 3 * TIMEOUT, "auto")
        elif kind_of(seed) == "serving":
            launch = ServingLaunch(laboratory, hosts, folder / f"serve-{sum(slots)}.dist")
        else:
            launch = Launch(laboratory, hosts, folder / f"{sum(slots)}.dist", folder / "x.npz", REPEATS, TIMEOUT)
        was_running = False
        if seed % 2:
            launch.wait_until_it_runs()
        for failure in failures:
            time.sleep(failure.after)
            was_running = was_running or bool(laboratory.pids_of(names[-1], launch.rank))
            inflict(laboratory, failure, launch)
        goes_on = all(failure.kind in (*HARMLESS, FULL_DISK) for failure in failures)
        if goes_on:
            # It goes on, until a user interrupts it. A launch that needs room may end before.
            time.sleep(4.0)
        has_failed = launch.process.poll() is not None or any(FAILED in line for _, line in launch.lines)
        too_early = goes_on and not is_full and has_failed
        found = []
        if isinstance(launch, ServingLaunch):
            found = _serves_again(laboratory, launch, failures, (folder / f"text-{sum(slots)}.txt").read_text())
        if goes_on or isinstance(launch, ServingLaunch):
            laboratory.unlimit(*names)
            # A training writes a checkpoint at SIGTERM, and a server answers open requests.
            _signal(laboratory.pids_of("n0", launch.launcher), 2 if kind_of(seed) == "calls" else 15)
        if any(failure.kind == "stop host" and failure.host == "n0" for failure in failures):
            time.sleep(4.0)
            _go_on(laboratory)
        start, limit = time.monotonic(), ENDING if was_running else CONNECTING
        code = launch.wait(limit)
        ended = time.monotonic() - start
        _put_in_order(laboratory)
        left = _left(laboratory)
        for name in names:
            laboratory.kill(name)
        lines = launch.text()
        resumed = _resume(laboratory, hosts, training, folder) if isinstance(launch, TrainingLaunch) else {}
    errors = [line for line in lines if line.startswith("error: ") or FAILED in line]
    is_named = bool(errors) and any(name in errors[0] for name in NAMES)
    wrong = {
        "it ended, though nothing was lost": too_early,
        f"it runs after {limit:g} s": code is None,
        "it ended with 0": code == 0,
        f"it ended with {code}": code is not None and code > 0 and code not in (75, 130, 143, *[2] * is_full),
        "it is not named": (code in (2, 75) or bool(errors)) and not is_named,
        "a traceback": any("Traceback" in line for line in lines if not line.startswith("[")),
        f"{left} are left": bool(left),
    }
    found += [text for text, is_wrong in wrong.items() if is_wrong] + resumed.pop("wrong", [])
    return {
        "seed": seed, "hosts": hosts, "what": [f"{f.kind} {f.host} after {f.after:.1f} s" for f in failures],
        "around": {name: str(value) for name, value in around.items()},
        "code": code, "ended": round(ended, 2), "named": errors[:1], "wrong": found, "text": lines[-30:] * bool(found),
        **resumed,
    }  # fmt: skip


def _serves_again(laboratory: Laboratory, launch: ServingLaunch, failures: list[Failure], expected: str) -> list[str]:
    """Put hosts and links in order, wait for an answer, and end the client; return the mistakes."""
    is_gone = any(f.kind == "launcher" or (f.kind == "host" and f.host == "n0") for f in failures)
    was_up, start = bool(launch.answers), time.monotonic()
    # Failures are to be seen by requests, too.
    time.sleep(3.0)
    _put_in_order(laboratory)
    laboratory.unlimit(*laboratory.names)
    again = (was_up or launch.ask()) and launch.wait_for_answer(200, max(start, time.monotonic()), RESUMED)
    is_up = launch.process.poll() is None
    launch.end_client()
    answers = [answer for _, answer in launch.answers if is_up or answer["status"]]
    wrong = {
        "the server has ended": was_up and not is_up and not is_gone,
        "it does not answer again": is_up and not again,
        "an answer differs": any(a["status"] == 200 and a["text"] != expected for a in answers),
        "a request failed otherwise": any(a["status"] not in (200, 503) for a in answers),
        "a request took too long": any(a["seconds"] > ANSWERED for a in answers),
    }
    return [f"{text}: {answers[-3:]}" for text, is_wrong in wrong.items() if is_wrong]


def _resume(laboratory: Laboratory, hosts: str, training: Training, folder: Path) -> dict[str, Any]:
    """Resume a training from its last checkpoint, or start it anew without one, and compare its losses."""
    laboratory.unlimit(*laboratory.names)
    step = max(saved_steps(training.checkpoints), default=0)
    launch = TrainingLaunch(laboratory, hosts, training, "batches", 30, "auto")
    # TCP waits 0.2 s for a frame that was lost.
    code = launch.wait(RESUMED * (2 if laboratory.loss else 1))
    for name in laboratory.names:
        laboratory.kill(name)
    expected = json.loads((folder / f"losses-{training.bundle.stem.removeprefix('train-')}.json").read_text())
    losses = training.losses() if code == 0 else []
    differs = [step for step, loss in losses if not math.isclose(loss, expected[step - 1], rel_tol=CLOSE)]
    wrong = {
        f"it resumed with {code}": code != 0,
        f"it has {len(losses)} steps": code == 0 and [step for step, _ in losses] != list(range(1, STEPS + 1)),
        f"losses differ from step {differs[:1]} on": bool(differs),
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    return {"resumed from": step, "wrong": found, "resumed": launch.text()[-30:] * bool(found)}


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Mount a small disk as a folder."""
    run_command("mount", "-t", "tmpfs", "-o", f"size={DISK},mode=755", "tmpfs", str(folder))
    try:
        yield
    finally:
        run_command("umount", "-l", str(folder))


def _put_in_order(laboratory: Laboratory) -> None:
    """Make room on the disk, continue stopped processes, and connect hosts that were cut off."""
    laboratory.empty_disk()
    for name in laboratory.names:
        laboratory.mend(name)
    _go_on(laboratory)


def _go_on(laboratory: Laboratory) -> None:
    _signal([pid for name in laboratory.names for pid in laboratory.pids(name)], 18)


def _left(laboratory: Laboratory) -> dict[str, list[str]]:
    """The processes that are on the hosts after four seconds, and the files in their shared memory."""
    until = time.monotonic() + 4.0
    while time.monotonic() < until and any(laboratory.pids(name) for name in laboratory.names):
        time.sleep(0.1)
    found = {}
    for name in laboratory.names:
        if pids := laboratory.pids(name):
            found[name] = [_command(pid) for pid in pids]
        if files := sorted(os.listdir(laboratory.hosts[name].root / "dev" / "shm")):
            found[name] = [*found.get(name, []), *files]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "a process that ended"


def main() -> None:
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + count):
        print(json.dumps(run(seed, folder)), flush=True)


if __name__ == "__main__":
    main()
