"""A sequence cut into stretches of as nearly equal cost as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balanced_cuts(costs: Sequence[float], crossing: Sequence[float], count: int) -> list[int]:
    """Where to cut a sequence into `count` stretches: the number of the first item of each but the first.

    `costs` are those of the items; ``crossing[i]`` is what it costs a stretch to begin with item i: what is
    sent to it. Of all ways to cut, the dearest stretch is as cheap as can be; among those the sum of squares is least,
    and then stretches in front are the shorter ones: in a pipeline they keep the most. By dynamic programming, in
    ``O(count * len(costs) ** 2)``. There must be as many items as stretches.
    """
    n = len(costs)
    assert 1 <= count <= n, "every stretch has an item"
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    begins = np.asarray(crossing, dtype=np.float64)
    # spans[i, j]: the cost of the stretch of the items from i up to j, which is not in it.
    spans = ends[None, :] - ends[:n, None] + begins[:, None]
    spans[np.arange(n)[:, None] >= np.arange(n + 1)[None, :]] = np.inf
    dearest = spans[0].copy()
    for _ in range(count - 1):
        dearest = np.concatenate([[np.inf], np.maximum(dearest[:n, None], spans).min(axis=0)[1:]])
    spans[spans > dearest[n] * (1 + 1e-9)] = np.inf
    squares = spans**2
    total = squares[0].copy()
    choices: list[np.ndarray] = []
    for _ in range(count - 1):
        sums = total[:n, None] + squares
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
