"""How well predictions agree with measurements."""

from __future__ import annotations

from collections.abc import Sequence


def undisturbed(seconds: Sequence[float]) -> float:
    """The time of a run that nothing else on the machine disturbs: the first decile of several.

    What disturbs only lengthens a run. On a shared virtual machine medians of one minute and the next differ by up to
    a factor of two, first deciles of several passes much less.
    """
    return sorted(seconds)[(len(seconds) - 1) // 10]


def mean_absolute_percentage_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The mean of ``|predicted / measured - 1|`` (MAPE)."""
    return sum(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)) / len(measured)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank. 0.0 where one of them does not vary."""
    a, b = _ranks(first), _ranks(second)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    below = (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5
    return top / below if below else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for i in order[start : stop + 1]:
            ranks[i] = (start + stop) / 2
        start = stop + 1
    return ranks
