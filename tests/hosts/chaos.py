"""Launches on hosts to which something happens at a random moment: ``python -m tests.hosts.chaos FOLDER FIRST COUNT``.

Run in namespaces. FOLDER has ``RANKS.dist`` for 2 to 5 ranks and ``x.npz``. Prints a line of JSON for each seed: what
happened, how the launch ended and after how many seconds, and what is wrong with that, if anything. A seed draws hosts,
ranks, one or two failures, and their moments: while hosts are connected, while ranks start, or while they run.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.laboratory import Laboratory, _signal
from tests.hosts.launches import KINDS, REPEATS, Failure, Launch, inflict

NAMES = (
    "was killed by", "crashed: ", "was stopped", "was lost: ", "has not answered for", "has not heard of ",
    "was not reached", "ended with exit code", "interrupted",
)  # fmt: skip
HARMLESS = ("slow", "held")
TIMEOUT = 10
CONNECTING, ENDING = 66.0, 9.0
"""Seconds in which a launch ends if its hosts are not connected, and if they are."""


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
    return slots, failures


def run(seed: int, folder: Path) -> dict[str, object]:
    """Run a seed; `wrong` says what is wrong with its end."""
    slots, failures = drawn(seed)
    names = tuple(f"n{number}" for number in range(len(slots)))
    hosts = ",".join(f"{name}:{count}" for name, count in zip(names, slots, strict=True))
    with tempfile.TemporaryDirectory() as own, Laboratory(Path(own), names, [folder]) as laboratory:
        bundle, given = folder / f"{sum(slots)}.dist", folder / "x.npz"
        launch = Launch(laboratory, hosts, bundle, given, REPEATS, TIMEOUT)
        was_running = False
        for failure in failures:
            time.sleep(failure.after)
            was_running = was_running or bool(laboratory.pids_of(names[-1], launch.rank))
            inflict(laboratory, failure, launch)
        harmless = all(failure.kind in HARMLESS for failure in failures)
        if harmless:
            # It goes on, until a user interrupts it.
            time.sleep(4.0)
        too_early = harmless and launch.process.poll() is not None
        if harmless:
            laboratory.unlimit(*names)
            _signal(laboratory.pids_of("n0", launch.launcher), 2)
        if any(failure.kind == "stop host" and failure.host == "n0" for failure in failures):
            time.sleep(4.0)
            _go_on(laboratory)
        start, limit = time.monotonic(), ENDING if was_running else CONNECTING
        code = launch.wait(limit)
        ended = time.monotonic() - start
        # What was stopped goes on, and links are mended.
        for name in names:
            laboratory.mend(name)
        _go_on(laboratory)
        left = _left(laboratory)
        for name in names:
            laboratory.kill(name)
        lines = launch.text()
    errors = [line for line in lines if line.startswith("error: ")]
    is_named = bool(errors) and any(name in errors[0] for name in NAMES)
    wrong = {
        "it ended, though nothing was lost": too_early,
        f"it runs after {limit:g} s": code is None,
        "it ended with 0": code == 0,
        f"it ended with {code}": code is not None and code > 0 and code not in (75, 130),
        "it is not named": code == 75 and not is_named,
        "a traceback": any("Traceback" in line for line in lines if not line.startswith("[")),
        f"{left} are left": bool(left),
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong]
    return {
        "seed": seed, "hosts": hosts, "what": [f"{f.kind} {f.host} after {f.after:.1f} s" for f in failures],
        "code": code, "ended": round(ended, 2), "named": errors[:1], "wrong": found, "text": lines[-30:] * bool(found),
    }  # fmt: skip


def _go_on(laboratory: Laboratory) -> None:
    _signal([pid for name in laboratory.names for pid in laboratory.pids(name)], 18)


def _left(laboratory: Laboratory) -> dict[str, list[str]]:
    """The processes that are on the hosts after four seconds."""
    until = time.monotonic() + 4.0
    while time.monotonic() < until and any(laboratory.pids(name) for name in laboratory.names):
        time.sleep(0.1)
    found = {}
    for name in laboratory.names:
        if pids := laboratory.pids(name):
            found[name] = [_command(pid) for pid in pids]
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
