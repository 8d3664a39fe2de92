"""The least time of a pipeline is no longer than that of any balanced cut of its blocks, by brute force."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations

import pytest

from distir_relax.schedules import Order, Times, order_of, timeline
from distir_relax.schedules.task import Task
from distir_relax.strategies.chain_partition import SLACK
from distir_relax.strategy_search.pipeline_bounds import Kept, OrderBounds, Pipeline, TaskSeconds


def equal(forward: float, inputs: float, weights: float) -> TaskSeconds:
    """The seconds of a part whose microbatches are all alike."""
    total = forward + inputs + weights
    return TaskSeconds(forward, inputs, weights, total, total, total)


def halves(task: Task) -> tuple[Task, ...]:
    """The two tasks of a whole backward; other tasks as they are."""
    return (replace(task, kind="I"), replace(task, kind="W")) if task.kind == "B" else (task,)


def cuts(blocks: int, stages: int, block: float, rest: tuple[float, float]) -> list[list[int]]:
    """All balanced cuts of blocks into stages, some without any; the first and the last stage have the rest."""
    found = []
    for ends in combinations(range(blocks + stages - 1), stages - 1):
        counts = [b - a - 1 for a, b in zip((-1, *ends), (*ends, blocks + stages - 1), strict=True)]
        costs = [count * block for count in counts]
        costs[0] += rest[0]
        costs[-1] += rest[1]
        found.append((max(costs), counts))
    least = min(found)[0]
    return [counts for slowest, counts in found if slowest <= least * (1 + SLACK)]


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "chunks", "blocks"),
    [("1f1b", 3, 2, 1, 7), ("1f1b", 3, 7, 1, 8), ("gpipe", 4, 5, 1, 9), ("zb-h1", 3, 5, 1, 7), ("zb-v", 3, 4, 2, 7),
     ("interleaved", 2, 4, 2, 5), ("interleaved", 3, 6, 2, 8), ("interleaved", 2, 6, 3, 8)],
)  # fmt: skip
def test_no_cut_is_faster(schedule: str, ranks: int, microbatches: int, chunks: int, blocks: int) -> None:
    rng = random.Random(f"{schedule} {ranks} {microbatches}")
    order = order_of(schedule, ranks, microbatches, chunks)
    bounds = OrderBounds.of(order)
    # A compiled backward is two tasks, and sends after the first.
    order = Order(tuple(tuple(part for task in tasks for part in halves(task)) for tasks in order.tasks), order.rank_of)
    tightness = []
    for _ in range(5):
        f, i, w = (rng.uniform(0.5, 2.0) for _ in range(3))
        first, last = rng.choice([(0.0, 0.0), (0.1, 0.7), (0.3, 1.6)])
        found = math.inf
        for counts in cuts(blocks, ranks * chunks, f + i + w, (first * (f + i + w), last * (f + i + w))):
            shares = [float(n) for n in counts]
            shares[0] += first
            shares[-1] += last
            times = Times(*([share * t for share in shares] for t in (f, i, w)))
            found = min(found, float(timeline(order, times).makespan))
        rest = equal(*((first + last) * t for t in (f, i, w)))
        pipeline = Pipeline(bounds, microbatches, chunks, blocks, first + last)
        least = pipeline.least_seconds(equal(f, i, w), rest, [math.inf] * ranks)
        assert least <= found * (1 + 1e-9)
        tightness.append(least / found)
    print(schedule, tightness)
    assert sum(tightness) / len(tightness) > 0.65


def test_memory_limits_the_blocks_of_ranks() -> None:
    pipeline = Pipeline(OrderBounds.of(order_of("1f1b", 3, 64)), 64, 1, 9, 0.0)
    block, rest = equal(1.0, 1.0, 1.0), equal(0.0, 0.0, 0.0)
    even = pipeline.least_seconds(block, rest, [3, 3, 3])
    assert even == pytest.approx(pipeline.least_seconds(block, rest, [9, 9, 9]), rel=1e-3)
    assert even == pytest.approx(64 * 9 + 2 * 6, rel=0.01)
    # No stage has four of them: cuts balance costs, whatever the memory.
    assert pipeline.least_seconds(block, rest, [2.9, 9, 9]) == math.inf
    uneven = replace(pipeline, blocks=8)
    assert uneven.least_seconds(block, rest, [2.9, 9, 9]) == pytest.approx(64 * 9 + 2 * 5, rel=0.01)
    assert uneven.least_seconds(block, rest, [2, 2, 9]) == math.inf


def test_an_order_tells_how_ranks_begin_and_end() -> None:
    kept = Kept(3, 1), Kept(2, 1), Kept(1, 1)
    expected = OrderBounds(kept, kept, kept, (1, 1, 1), arrives=True, returns=True)
    assert OrderBounds.of(order_of("1f1b", 3, 5)) == expected
    # Without gradients all are in flight, and with gradients all but one.
    gpipe = OrderBounds.of(order_of("gpipe", 3, 5))
    assert (gpipe.in_flight, gpipe.by_all) == ((Kept(5, 1),) * 3, (Kept(4, 1),) * 3)
    # The second of two backwards is the last to use weights.
    assert OrderBounds.of(order_of("1f1b", 3, 2)).by_all == (Kept(1, 0),) * 3
    # One stage of each rank is done when the other one has gradients; then nothing is in flight on the first.
    in_turn = OrderBounds.of(order_of("gpipe", 3, 5, 2))
    assert in_turn.in_flight == (Kept(5, 1),) * 3
    assert (in_turn.by_one, in_turn.by_all) == ((Kept(0, 1),) * 3, (Kept(0, 0),) * 3)
    zero_bubble = OrderBounds.of(order_of("zb-h1", 3, 5))
    assert zero_bubble.returns
    assert zero_bubble.late == (1, 2, 3)
    assert [kept.pending for kept in zero_bubble.in_flight] == [1, 2, 3]
    assert [kept.pending for kept in zero_bubble.by_all] == [1, 2, 3]
    one, none = (Kept(1, 0),) * 2, (Kept(0, 0),) * 2
    assert OrderBounds.unknown(2) == OrderBounds(one, one, one, (0, 0), arrives=False, returns=False)
    assert OrderBounds.unknown(2, chunks=2) == OrderBounds(one, none, none, (0, 0), arrives=False, returns=False)
