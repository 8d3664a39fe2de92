"""Time budget of a calibration: how long one measurement may take, and whether there is time for another pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from distir_relax.runtime.world import ALONE, World

T = TypeVar("T")

# Margin for a pass that takes longer than the one before it.
_SLACK = 1.15


class Budget:
    """A deadline `seconds` from now, or none if they are 0. `clock` returns the time.

    Ranks of a launch decide together, by the clock of rank 0.
    """

    def __init__(self, seconds: float, world: World = ALONE, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._world = world
        self._end = clock() + seconds if seconds else math.inf

    @property
    def left(self) -> float:
        """The remaining seconds, at least 0."""
        return max(0.0, self._end - self._clock())

    def share(self, count: float) -> float:
        """Return the seconds that each of `count` measurements may take. Collective: all ranks call this together."""
        return self._agreed(self.left / max(count, 1.0))

    def passes(self, limit: int, one: Callable[[], T]) -> list[T]:
        """Return the results of `one` in 1 to `limit` passes: as many as fit, assuming the longest pass so far.

        Collective: all ranks call this together.
        """
        results: list[T] = []
        longest = 0.0
        for number in range(limit):
            if number and self._agreed(self.left) < _SLACK * longest:
                break
            begin = self._clock()
            results.append(one())
            longest = max(longest, self._agreed(self._clock() - begin))
        return results

    def _agreed(self, seconds: float) -> float:
        """Return the value of rank 0."""
        if self._world.size == 1:
            return seconds
        # JSON has no infinity.
        agreed = self._world.exchange(None if math.isinf(seconds) else seconds)[0]
        return math.inf if agreed is None else float(agreed)
