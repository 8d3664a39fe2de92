"""Uncertainty of a fitted profile: standard deviations of its errors by kind of op, and the interval that follows.

The errors of a kind are one factor for all its ops in a program, and independent of those of other kinds. So the
relative variance of a time is the sum of ``(deviation * share) ** 2`` over the kinds, where the shares are those of the
kinds in the time, and of the variances that all programs have: errors that no kind explains, and the noise of repeated
measurements. Errors are normally distributed in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

_WITHIN_90 = 1.6448536269514722
"""Standard deviations on either side of the mean between which 90 % of a normal distribution are."""


@dataclass(frozen=True)
class Uncertainty:
    """Relative standard deviations of a profile's errors: by kind of op, and of whole programs.

    `products` are of matrices, `rows` norms, attention, reductions and others that are not elementwise. `programs` is
    the deviation of a program's time that the kinds do not explain, `repeatability` that of two measurements of it.
    """

    products: float = 0.0
    elementwise: float = 0.0
    views: float = 0.0
    rows: float = 0.0
    collectives: float = 0.0
    programs: float = 0.0
    repeatability: float = 0.0

    def of_kinds(self, seconds: Mapping[str, float]) -> float:
        """Return the relative standard deviation of the sum of these seconds by kind, by the errors of kinds alone."""
        total = sum(seconds.values())
        return math.sqrt(sum((getattr(self, kind) * t / total) ** 2 for kind, t in seconds.items())) if total else 0.0

    def interval(self, makespan: float, seconds: Mapping[str, float]) -> tuple[float, float]:
        """Return the low and high end of the 90 % interval of a makespan whose parts by kind are as `seconds`."""
        deviation = math.hypot(self.of_kinds(seconds), self.programs, self.repeatability)
        factor = math.exp(_WITHIN_90 * deviation)
        return makespan / factor, makespan * factor


OP_KINDS = tuple(f.name for f in fields(Uncertainty) if f.name not in ("programs", "repeatability"))
"""The kinds of ops whose errors are independent."""
