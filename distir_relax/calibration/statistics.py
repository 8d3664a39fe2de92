"""Statistics of measurements, and of their agreement with predictions."""

from __future__ import annotations

from collections.abc import Sequence


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the first decile of several times: that of an undisturbed run.

    Interference only lengthens a run. On a shared virtual machine medians vary by up to a factor of two within a
    minute, first deciles of several passes much less.
    """
    return sorted(seconds)[(len(seconds) - 1) // 10]


def mean_absolute_percentage_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the mean of ``|predicted / measured - 1|`` (MAPE)."""
    return sum(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)) / len(measured)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; ties share their mean rank. 0.0 if one of them does not vary."""
    from scipy import stats

    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    return float(stats.spearmanr(first, second).statistic)
