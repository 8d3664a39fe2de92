"""Comparison of predicted and measured configurations: times, memory peaks, the order of pairs, and how much of the
error is noise of the measurement.

A machine varies between passes. The passes are split into two halves, every second one in each, and the undisturbed
times of the halves are compared. If the logarithm of such a time has the variance v, the difference of two halves has
2 v, and the time of all passes about v / 2: a quarter of that of the difference. The squared error of a prediction is
the sum of its own and of this noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from distir_relax.calibration.calibrate import Calibration
from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman, undisturbed

MIN_GAP = 0.05
"""Relative difference in measured time above which the order of two configurations counts."""


@dataclass(frozen=True)
class Outcome:
    """One configuration: the seconds of a step, predicted and measured (undisturbed, of several steps), and the bytes
    of the memory peak on each rank.

    Configurations of one `group` differ only in the compared fields; "" is no group. `kind`, `dtype` and `strategy` are
    as in `Configuration`. `passes` has the undisturbed seconds of each pass, `interval` the low and high end of the
    prediction's 90 % interval, None if the profile has no uncertainties. There are no peaks of text generation.
    """

    name: str
    ranks: int
    predicted: float
    measured: float
    predicted_peaks: tuple[int, ...]
    measured_peaks: tuple[int, ...]
    group: str = ""
    kind: str = "inference"
    dtype: str = "float32"
    strategy: str = ""
    passes: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.1 is 10 % too long."""
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float:
        """Relative error of the peak on the rank with the largest error: 0.1 is 10 % too much."""
        pairs = zip(self.predicted_peaks, self.measured_peaks, strict=True)
        return max((p / m - 1 for p, m in pairs), key=abs, default=0.0)

    @property
    def halves(self) -> tuple[float, float] | None:
        """The undisturbed seconds of every second pass, and of the others; None of fewer than two passes."""
        if len(self.passes) < 2:
            return None
        return undisturbed(self.passes[::2]), undisturbed(self.passes[1::2])

    @property
    def is_covered(self) -> bool:
        """Whether the measured time is within the prediction's interval."""
        return self.interval is not None and self.interval[0] <= self.measured <= self.interval[1]


@dataclass(frozen=True)
class Repeatability:
    """How well measurements agree with each other: Spearman's correlation of the two halves of the passes, the mean
    relative difference of these, and the standard deviation (relative) of `noise` in a time of all passes.

    `error` is the root mean square of the predictions' relative errors, `own_error` without that noise.
    """

    spearman: float
    difference: float
    noise: float
    error: float
    own_error: float


@dataclass(frozen=True)
class Part:
    """The agreement of the configurations that have one `value` of a property: number, mean absolute error, and bias,
    the mean error with its sign."""

    name: str
    value: str
    count: int
    mape: float
    bias: float


@dataclass(frozen=True)
class Pair:
    """Two configurations of a group, `slower` and `faster` as measured."""

    slower: Outcome
    faster: Outcome

    @property
    def is_predicted(self) -> bool:
        """Whether the predictions have the same order."""
        return self.slower.predicted > self.faster.predicted


@dataclass(frozen=True)
class Validation:
    """All outcomes and their agreement, and the calibration that was measured with them, if any.

    `compared` names the fields of strategies in which the configurations of a group may differ.
    """

    outcomes: tuple[Outcome, ...]
    calibration: Calibration | None = None
    compared: tuple[str, ...] = ()

    @property
    def mape(self) -> float:
        """Mean absolute percentage error of times."""
        return mean_absolute_percentage_error(*self._columns())

    @property
    def spearman(self) -> float:
        """Rank correlation of predicted and measured times."""
        return spearman(*self._columns())

    @property
    def peak_error(self) -> float:
        """Largest relative error of a memory peak, over ranks and configurations."""
        return max((o.peak_error for o in self.outcomes), key=abs)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Pairs of a group whose measured times differ by more than `MIN_GAP`."""
        return tuple(pair for group in self._groups() for pair in _ordered_pairs(group))

    @property
    def covered(self) -> int | None:
        """The number of configurations whose time is within the prediction's interval; None without intervals."""
        if all(o.interval is None for o in self.outcomes):
            return None
        return sum(o.is_covered for o in self.outcomes)

    @property
    def repeatability(self) -> Repeatability | None:
        """The agreement of the passes with each other; None of fewer than two."""
        halves = [o.halves for o in self.outcomes]
        pairs = [pair for pair in halves if pair is not None]
        if not pairs or len(pairs) < len(halves):
            return None
        first, second = zip(*pairs, strict=True)
        noise = fmean(math.log(a / b) ** 2 for a, b in pairs) / 4
        error = fmean(math.log(o.predicted / o.measured) ** 2 for o in self.outcomes)
        return Repeatability(
            spearman(first, second),
            mean_absolute_percentage_error(first, second),
            math.sqrt(noise),
            math.sqrt(error),
            math.sqrt(max(0.0, error - noise)),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The agreement by kind, dtype, strategy and number of ranks, where configurations differ in it."""
        found = []
        for name, key in _PROPERTIES.items():
            groups: dict[str, list[Outcome]] = {}
            for outcome in self.outcomes:
                groups.setdefault(key(outcome), []).append(outcome)
            if len(groups) > 1:
                found += [_part(name, value, groups[value]) for value in sorted(groups)]
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON."""
        pairs = [
            {"slower": pair.slower.name, "faster": pair.faster.name, "foreseen": pair.is_predicted}
            for pair in self.pairs
        ]
        return {
            "spearman": self.spearman,
            "mape": self.mape,
            "peak_error": self.peak_error,
            "compared": list(self.compared),
            "pairs": pairs,
            "covered": self.covered,
            "repeatability": None if self.repeatability is None else asdict(self.repeatability),
            "parts": [asdict(part) for part in self.parts],
            "outcomes": [asdict(o) for o in self.outcomes],
        }

    def _groups(self) -> list[list[Outcome]]:
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            if outcome.group:
                groups.setdefault(outcome.group, []).append(outcome)
        return list(groups.values())

    def _columns(self) -> tuple[list[float], list[float]]:
        return [o.predicted for o in self.outcomes], [o.measured for o in self.outcomes]


_PROPERTIES: dict[str, Callable[[Outcome], str]] = {
    "kind": lambda o: o.kind,
    "dtype": lambda o: o.dtype,
    "strategy": lambda o: o.strategy or "by hand",
    "ranks": lambda o: str(o.ranks),
}


def _part(name: str, value: str, outcomes: Sequence[Outcome]) -> Part:
    errors = [o.error for o in outcomes]
    return Part(name, value, len(errors), fmean(map(abs, errors)), fmean(errors))


def _ordered_pairs(group: Sequence[Outcome]) -> list[Pair]:
    pairs = []
    for pair in combinations(group, 2):
        faster, slower = sorted(pair, key=lambda o: o.measured)
        if slower.measured > (1 + MIN_GAP) * faster.measured:
            pairs.append(Pair(slower, faster))
    return pairs
