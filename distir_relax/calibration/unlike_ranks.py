"""Ranks of a launch that differ in speed or memory, as groups of a profile.

All ranks do the same work at the same moments, so a disturbance of the whole machine cancels in the ratio of two ranks.
A rank differs in speed if the mean logarithm of its ratio to a reference does, by more than `LEAST` and by more than
three standard errors. The reference is the rank in the middle, the faster one of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low

from distir_relax.cost.heterogeneous import Group

LEAST = 0.05
"""Relative difference in speed from which ranks are unlike."""
_ERRORS = 3.0
"""Standard errors by which ranks differ that are unlike."""
_MEMORY = 0.01
"""Relative difference in memory from which ranks are unlike."""
_MAD = 1.4826
"""The standard deviation of a normal distribution, relative to its median absolute deviation."""


def unlike_ranks(seconds: Sequence[Sequence[float]], memory: Sequence[float] = ()) -> tuple[Group, ...]:
    """Return the groups of ranks that are slower or faster, or have another memory, than the reference rank.

    `seconds` has for each rank the times of equal work, measured at the same moments, and `memory` the bytes of its
    device.
    """
    if len(seconds) < 2:
        return ()
    moments = [median(map(math.log, at)) for at in zip(*seconds, strict=True)]
    places = [median(math.log(t) - at for t, at in zip(times, moments, strict=True)) for times in seconds]
    reference = places.index(median_low(places))
    groups: dict[tuple[float, float | None], list[int]] = {}
    for rank, times in enumerate(seconds):
        speed = _speed(times, seconds[reference])
        differs = bool(memory) and abs(memory[rank] / memory[reference] - 1) > _MEMORY
        if speed != 1.0 or differs:
            groups.setdefault((speed, memory[rank] if differs else None), []).append(rank)
    return tuple(Group(tuple((r, r) for r in ranks), *spec) for spec, ranks in groups.items())


def _speed(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return a rank's speed relative to the reference, 1 if it does not differ."""
    ratios = [math.log(b / a) for a, b in zip(seconds, reference, strict=True)]
    # Medians: now and then the system takes a core from a rank for longer than the whole work.
    middle = median(ratios)
    error = _MAD * median(abs(r - middle) for r in ratios) / math.sqrt(len(ratios))
    is_unlike = abs(math.expm1(middle)) > LEAST and abs(middle) > _ERRORS * error
    return round(math.exp(middle), 3) if is_unlike else 1.0
