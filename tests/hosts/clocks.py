"""Clocks of a host that differ from those of the machine.

The monotonic clock and the time since boot are shifted by a time namespace of the kernel. There is none for the wall
clock: a library, which the machine's C compiler makes, is loaded before the C library into every process of the host,
and shifts the results of `clock_gettime`, `gettimeofday` and `time`. Python's `time`, `datetime` and `logging` see the
shifted clock. The kernel does not: times of files are those of the machine, and so are deadlines that a native library
passes to the kernel by the wall clock; Python's own waits use the monotonic clock.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DAY = 86_400
VARIABLE = "LABORATORY_WALL_CLOCK"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    const char *text = getenv(VARIABLE);
    shift = text ? atol(text) : 0;
    real = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    /* Constructors of other libraries may ask before ours has run. */
    if (!real) start();
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result) *result = exact.tv_sec;
    return exact.tv_sec;
}
"""


@dataclass(frozen=True)
class Clocks:
    """Whole seconds by which a host's clocks are ahead of the machine's; negative ones are behind.

    The monotonic clock cannot be behind by more than the machine has run.
    """

    monotonic: int = 0
    wall: int = 0

    @property
    def namespace(self) -> list[str]:
        """The options of `unshare` for the monotonic clock."""
        return ["--time", f"--monotonic={self.monotonic}", f"--boottime={self.monotonic}"] if self.monotonic else []


def has_compiler() -> bool:
    """Return whether the wall clock of a host can be shifted on this machine."""
    return shutil.which("cc") is not None


def wall_clock_library(folder: Path) -> Path:
    """Compile the library that shifts the wall clock by the seconds in `VARIABLE`; return its path."""
    source, library = folder / "wall_clock.c", folder / "wall_clock.so"
    source.write_text(_SOURCE)
    flags = ("-shared", "-fPIC", "-O1", f'-DVARIABLE="{VARIABLE}"')
    subprocess.run(["cc", *flags, "-o", library, source, "-ldl"], check=True)
    return library
