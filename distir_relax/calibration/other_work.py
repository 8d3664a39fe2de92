"""Work of other processes during a measurement, which would make figures of this machine too slow.

Linux counts the seconds that all processors of a machine were busy, and those of this process and of its children that
have ended. What remains are other processes, and time that a virtual machine was not given.
"""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_SHARE = 0.05
"""The part of a measurement's processor time above which other work is reported."""

_STAT = Path("/proc/stat")
# The columns of a processor's times in /proc/stat that are neither idle nor part of another column.
_BUSY = (0, 1, 2, 5, 6, 7)


@contextmanager
def warn_of_other_work(
    cores: int = 0, busy: Callable[[], float] | None = None, own: Callable[[], float] | None = None
) -> Iterator[None]:
    """Measure within this context; warn at its end if other processes took more than `MAX_SHARE` of the time of
    `cores` processors, by default all of this machine. Ranks that the measurement starts must have ended then.

    `busy` and `own` return the seconds of all processors and of this process with its children, by default as Linux
    counts them; elsewhere nothing is known, and nothing said.
    """
    busy, own, cores = busy or busy_seconds, own or own_seconds, cores or os.cpu_count() or 1
    start, before = time.monotonic(), busy() - own()
    yield
    seconds, other = time.monotonic() - start, busy() - own() - before
    # An idle Linux works a little too, and counts in hundredths of a second.
    if seconds > 1.0 and other > MAX_SHARE * seconds * cores:
        warnings.warn(
            f"other processes used {other / (seconds * cores):.0%} of {cores} processors during the measurement: the "
            "machine is faster than measured; stop other work, and measure again",
            stacklevel=3,
        )


def busy_seconds() -> float:
    """Return the seconds that all processors of this machine were busy since its start, 0 where that is not known."""
    if not _STAT.exists():
        return 0.0
    ticks = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:]]
    return sum(ticks[i] for i in _BUSY if i < len(ticks)) / float(os.sysconf("SC_CLK_TCK"))


def own_seconds() -> float:
    """Return the processor time of this process, and of its children that have ended."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)
