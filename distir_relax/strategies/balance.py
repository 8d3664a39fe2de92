"""A sequence cut into stretches of as nearly equal cost as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SLACK = 0.02
"""By how much, as a part, the dearest stretch may be dearer than it need be: equal stages are worth that."""


def balanced_cuts(costs: Sequence[float], crossing: Sequence[float], count: int) -> list[int]:
    """Where to cut a sequence into `count` stretches: the number of the first item of each but the first.

    `costs` are those of the items; ``crossing[i]`` is what it costs to send to a stretch that begins with item i. It is
    sent beside the work: a stretch is as dear as the dearer of both. The dearest stretch is at most by `SLACK` dearer
    than in any other way to cut; of those, stretches are as nearly equal as can be, and little is sent; and then those
    in front are the shorter ones: in a pipeline they keep the most. By dynamic programming, in
    ``O(count * len(costs) ** 2)``. There must be as many items as stretches.
    """
    n = len(costs)
    assert 1 <= count <= n, "every stretch has an item"
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    begins = np.asarray(crossing, dtype=np.float64)[:, None]
    # Of the stretch of the items from i up to j, which is not in it, what its items cost.
    inside = ends[None, :] - ends[:n, None]
    empty = np.arange(n)[:, None] >= np.arange(n + 1)[None, :]
    spans = np.where(empty, np.inf, np.maximum(inside, begins))
    dearest = spans[0].copy()
    for _ in range(count - 1):
        dearest = np.concatenate([[np.inf], np.maximum(dearest[:n, None], spans).min(axis=0)[1:]])
    uneven = np.where(spans > dearest[n] * (1 + SLACK), np.inf, inside**2 + begins * (ends[n] / count))
    total = uneven[0].copy()
    choices: list[np.ndarray] = []
    for _ in range(count - 1):
        sums = total[:n, None] + uneven
        choices.append(_first_least(sums))
        total = sums.min(axis=0)
    cuts: list[int] = []
    end = n
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return cuts[::-1]


def _first_least(sums: np.ndarray) -> np.ndarray:
    """For each column the first row that is least, but for rounding."""
    least = sums.min(axis=0)
    return np.asarray((sums <= least * (1 + 1e-9)).argmax(axis=0))
