"""A sequence cut into stretches of as nearly equal cost as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SLACK = 0.02
"""By how much, as a part, the dearest stretch may be dearer than it need be: equal stages are worth that."""


def balanced_cuts(
    costs: Sequence[float],
    crossing: Sequence[float],
    count: int,
    speeds: Sequence[float] = (),
    held: Sequence[float] = (),
    rooms: Sequence[float] = (),
) -> list[int]:
    """Where to cut a sequence into `count` stretches: the number of the first item of each but the first.

    `costs` are those of the items, which stretch number i works off at ``speeds[i]``, 1 unless given; ``crossing[i]``
    is what it costs to send to a stretch that begins with item i. It is sent beside the work: a stretch is as dear as
    the dearer of both. The items of stretch i hold no more than ``rooms[i]`` of `held`, if any way to cut can do that.
    The dearest stretch is at most by `SLACK` dearer than in any other way to cut; of those, stretches are as nearly
    equal as can be, and little is sent; and then those in front are the shorter ones: in a pipeline they keep the most.
    By dynamic programming, in ``O(count * len(costs) ** 2)``. There must be as many items as stretches.
    """
    n = len(costs)
    assert 1 <= count <= n, "every stretch has an item"
    begins = np.asarray(crossing, dtype=np.float64)[:, None]
    inside, empty = _between(costs), np.arange(n)[:, None] >= np.arange(n + 1)[None, :]
    full = _between(held) if held else np.zeros_like(inside)
    kinds = list(zip(speeds or (1.0,) * count, rooms or (np.inf,) * count, strict=True))
    work = {kind: inside / kind[0] for kind in kinds}
    spans = {
        (speed, room): np.where(empty | (full > room), np.inf, np.maximum(work[speed, room], begins))
        for speed, room in work
    }
    dearest = spans[kinds[0]][0].copy()
    for kind in kinds[1:]:
        dearest = np.concatenate([[np.inf], np.maximum(dearest[:n, None], spans[kind]).min(axis=0)[1:]])
    if np.isinf(dearest[n]):
        return balanced_cuts(costs, crossing, count, speeds)
    sent = begins * (inside[0, n] / count)
    uneven = {
        kind: np.where(spans[kind] > dearest[n] * (1 + SLACK), np.inf, own**2 + sent) for kind, own in work.items()
    }
    total = uneven[kinds[0]][0].copy()
    choices: list[np.ndarray] = []
    for kind in kinds[1:]:
        sums = total[:n, None] + uneven[kind]
        choices.append(_first_least(sums))
        total = sums.min(axis=0)
    cuts: list[int] = []
    end = n
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return cuts[::-1]


def _between(amounts: Sequence[float]) -> np.ndarray:
    """The sum of the items from i up to j, which is not among them."""
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=np.float64))])
    return np.asarray(ends[None, :] - ends[:-1, None])


def _first_least(sums: np.ndarray) -> np.ndarray:
    """For each column the first row that is least, but for rounding."""
    least = sums.min(axis=0)
    return np.asarray((sums <= least * (1 + 1e-9)).argmax(axis=0))
