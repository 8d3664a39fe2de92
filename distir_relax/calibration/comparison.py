"""What was predicted of configurations beside what was measured: times, peaks of memory, and which of two is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from distir_relax.calibration.calibrate import Calibration
from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman

APART = 0.05
"""Two configurations have an order where the slower one takes longer by more than this share."""


@dataclass(frozen=True)
class Outcome:
    """One configuration: the seconds of a step, predicted and measured (undisturbed, of several steps), and the bytes
    of the peak of memory on each rank.

    Configurations of one `group` are alike but for what is compared; "" is in none.
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
        """How far off the prediction is: 0.1 is a tenth too long."""
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float:
        """How far off the peak is on the rank where that is most: 0.1 is a tenth too much."""
        pairs = zip(self.predicted_peaks, self.measured_peaks, strict=True)
        return max((p / m - 1 for p, m in pairs), key=abs)


@dataclass(frozen=True)
class Pair:
    """Two configurations of a group, `slower` and `faster` as measured, and whether that was predicted."""

    slower: Outcome
    faster: Outcome

    @property
    def is_foreseen(self) -> bool:
        """Whether they are in this order by their predictions too."""
        return self.slower.predicted > self.faster.predicted


@dataclass(frozen=True)
class Validation:
    """All outcomes, and how well they agree; and the calibration that was made for them, if one was.

    `compared` names the fields of strategies in which the configurations of a group may differ.
    """

    outcomes: tuple[Outcome, ...]
    calibration: Calibration | None = None
    compared: tuple[str, ...] = ()

    @property
    def mape(self) -> float:
        """The mean absolute percentage error of times."""
        return mean_absolute_percentage_error(*self._columns())

    @property
    def spearman(self) -> float:
        """The rank correlation of predicted and measured times."""
        return spearman(*self._columns())

    @property
    def peak_error(self) -> float:
        """How far off the peak of memory is on the rank and in the configuration where that is most."""
        return max((o.peak_error for o in self.outcomes), key=abs)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All two configurations of a group that are `APART`."""
        return tuple(pair for group in self._groups() for pair in _apart(group))

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        pairs = [
            {"slower": pair.slower.name, "faster": pair.faster.name, "foreseen": pair.is_foreseen}
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


def _apart(group: Sequence[Outcome]) -> list[Pair]:
    found = []
    for two in combinations(group, 2):
        faster, slower = sorted(two, key=lambda o: o.measured)
        if slower.measured > (1 + APART) * faster.measured:
            found.append(Pair(slower, faster))
    return found
