"""The times at which a rank's program reaches its ops, for programs that were emitted with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from distir_relax.kernels.recording import runs_whole

_marks: list[tuple[int, int]] = []
_wait: list[Callable[[], None]] = []


@runs_whole
def clock(number: int) -> None:
    """Record that the op of a number has finished; -1 is the beginning of a step."""
    for wait in _wait:
        wait()
    _marks.append((number, time.perf_counter_ns()))


def wait_with(synchronize: Callable[[], None]) -> None:
    """Let each op wait for an accelerator."""
    _wait[:] = [synchronize]


def take_marks() -> list[tuple[int, int]]:
    """Return the numbers of ops that were recorded since the last call, each with its nanoseconds, in order."""
    taken = list(_marks)
    _marks.clear()
    return taken
