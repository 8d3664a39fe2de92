"""Time budget of a calibration: how long one measurement may take, and whether there is time for another pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from distir_relax.runtime.world import World

T = TypeVar("T")

# A pass that takes longer than the one before it still ends in time.
_SLACK = 1.15


class Budget:
    """A deadline `seconds` from now, or none where they are 0. `clock` gives the time.

    Ranks of a launch decide together, by the clock of rank 0.
    """

    def __init__(self, seconds: float, world: World | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._world = world
        self._end = clock() + seconds if seconds else math.inf

    @property
    def left(self) -> float:
        """The seconds that are left, 0 where there are none."""
        return max(0.0, self._end - self._clock())

    def share(self, count: float) -> float:
        """The seconds that each of `count` measurements may take. All ranks call this together."""
        return self._agreed(self.left / max(count, 1.0))

    def passes(self, most: int, one: Callable[[], T]) -> list[T]:
        """The results of `one` in 1 to `most` passes: as many as fit, each as long as the longest so far.

        All ranks call this together.
        """
        found: list[T] = []
        longest = 0.0
        for number in range(most):
            if number and self._agreed(self.left) < _SLACK * longest:
                break
            begin = self._clock()
            found.append(one())
            longest = max(longest, self._agreed(self._clock() - begin))
        return found

    def _agreed(self, seconds: float) -> float:
        """The value of rank 0."""
        if self._world is None or self._world.size == 1:
            return seconds
        # JSON has no infinity.
        found = self._world.exchange(None if math.isinf(seconds) else seconds)[0]
        return math.inf if found is None else float(found)
