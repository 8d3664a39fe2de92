"""What kernels write when they wait for other ranks, for the watchdog and the reports: see `native/shared_sum.cpp`."""

from __future__ import annotations

from array import array

from distir_relax.kernels.native import NUMBERS_OF_WAITS


def in_call(step: int, time: int) -> int:
    """Return what a kernel writes while it waits in a step, of the call number `time` of the function with that."""
    return step | time << 32


class NativeWaits:
    """The step in which a kernel waits, the last one in which it did, and how long all kernels have waited.

    Kernels write to `address`. A step has the number of the call of its function, 0 for the first.
    """

    def __init__(self) -> None:
        self._numbers = array("q", [-1, -1] + [0] * (NUMBERS_OF_WAITS - 2))
        self.address = self._numbers.buffer_info()[0]

    @property
    def step(self) -> tuple[int, int] | None:
        """The number of the current step, and that of its call; None while no kernel waits."""
        return _parts(self._numbers[0])

    @property
    def last(self) -> tuple[int, int] | None:
        """The number of the last step that has finished, and that of its call; None if none has since `forget`."""
        return _parts(self._numbers[1])

    def forget(self) -> None:
        """Forget the last step."""
        self._numbers[1] = -1

    @property
    def waited(self) -> float:
        """Seconds of all waits that have ended."""
        return self._numbers[2] / 1e9

    @property
    def since(self) -> float:
        """The begin of the last wait, in seconds as of `time.monotonic`."""
        return self._numbers[3] + self._numbers[4] / 1e9


def _parts(number: int) -> tuple[int, int] | None:
    return None if number < 0 else (number & 0xFFFFFFFF, number >> 32)
