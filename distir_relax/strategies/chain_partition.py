"""Partition a sequence into consecutive stages of balanced cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SLACK = 0.02
"""Relative excess of the slowest stage over the optimum that is accepted for more equal stages."""


def balanced_cuts(
    costs: Sequence[float],
    crossing: Sequence[float],
    count: int,
    speeds: Sequence[float] = (),
    memory: Sequence[float] = (),
    limits: Sequence[float] = (),
) -> list[int]:
    """Partition a sequence into `count` stages: return the number of the first item of each but the first.

    `costs` are those of the items, which stage i processes at ``speeds[i]``, 1 unless given; ``crossing[i]`` is the
    cost of sending to a stage that begins with item i. It overlaps with the work: a stage costs the larger of both. The
    items of stage i have at most ``limits[i]`` of `memory` in total, if any partition satisfies that. The slowest stage
    is within `SLACK` of optimal; among those partitions stages are as equal as possible and send little, and then
    earlier stages are shorter: in a pipeline they store the most activations. Dynamic programming in ``O(count *
    len(costs) ** 2)``. There must be at least as many items as stages.
    """
    n = len(costs)
    assert 1 <= count <= n, "every stage has an item"
    send_costs = np.asarray(crossing, dtype=np.float64)[:, None]
    range_costs, empty = _range_sums(costs), np.arange(n)[:, None] >= np.arange(n + 1)[None, :]
    range_memory = _range_sums(memory) if memory else np.zeros_like(range_costs)
    classes = list(zip(speeds or (1.0,) * count, limits or (np.inf,) * count, strict=True))
    work = {c: range_costs / c[0] for c in classes}
    spans = {
        (speed, limit): np.where(empty | (range_memory > limit), np.inf, np.maximum(work[speed, limit], send_costs))
        for speed, limit in work
    }
    slowest = spans[classes[0]][0].copy()
    for c in classes[1:]:
        slowest = np.concatenate([[np.inf], np.maximum(slowest[:n, None], spans[c]).min(axis=0)[1:]])
    if np.isinf(slowest[n]):
        return balanced_cuts(costs, crossing, count, speeds)
    send_penalty = send_costs * (range_costs[0, n] / count)
    penalties = {
        c: np.where(spans[c] > slowest[n] * (1 + SLACK), np.inf, cost**2 + send_penalty) for c, cost in work.items()
    }
    total = penalties[classes[0]][0].copy()
    choices: list[np.ndarray] = []
    for c in classes[1:]:
        sums = total[:n, None] + penalties[c]
        choices.append(_first_minimum(sums))
        total = sums.min(axis=0)
    cuts: list[int] = []
    end = n
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return cuts[::-1]


def _range_sums(amounts: Sequence[float]) -> np.ndarray:
    """Return the sum of the items from i up to, excluding, j."""
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=np.float64))])
    return np.asarray(ends[None, :] - ends[:-1, None])


def _first_minimum(sums: np.ndarray) -> np.ndarray:
    """Return for each column the first row that is minimal, up to rounding."""
    least = sums.min(axis=0)
    return np.asarray((sums <= least * (1 + 1e-9)).argmax(axis=0))
