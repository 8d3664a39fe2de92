"""Comparison of predicted and measured configurations: times, memory peaks, and the order of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from distir_relax.calibration.calibrate import Calibration
from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman

MIN_GAP = 0.05
"""Relative difference in measured time above which the order of two configurations counts."""


@dataclass(frozen=True)
class Outcome:
    """One configuration: the seconds of a step, predicted and measured (undisturbed, of several steps), and the bytes
    of the memory peak on each rank.

    Configurations of one `group` differ only in the compared fields; "" is no group.
    """

    name: str
    ranks: int
    predicted: float
    measured: float
    predicted_peaks: tuple[int, ...]
    measured_peaks: tuple[int, ...]
    group: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.1 is 10 % too long."""
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float:
        """Relative error of the peak on the rank with the largest error: 0.1 is 10 % too much."""
        pairs = zip(self.predicted_peaks, self.measured_peaks, strict=True)
        return max((p / m - 1 for p, m in pairs), key=abs)


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


def _ordered_pairs(group: Sequence[Outcome]) -> list[Pair]:
    pairs = []
    for pair in combinations(group, 2):
        faster, slower = sorted(pair, key=lambda o: o.measured)
        if slower.measured > (1 + MIN_GAP) * faster.measured:
            pairs.append(Pair(slower, faster))
    return pairs
