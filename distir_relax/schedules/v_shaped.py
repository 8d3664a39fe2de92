"""V-shaped schedules: two stages per rank, in a V, so that a microbatch ends on the rank where it began."""

from __future__ import annotations

from distir_relax.schedules.registry import schedule
from distir_relax.schedules.task import Order, Shape
from distir_relax.schedules.task_list import TaskList


@schedule("zb-v", weights="apart", chunks=2)
def zb_v(shape: Shape) -> Order:
    """ZB-V (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): ranks store p stage activations each.

    Rank 0 has the first and the last stage, so gradients return to it at once. The order is constructed for at least 2p
    - 1 microbatches and truncated.
    """
    microbatches = max(shape.microbatches, 2 * shape.ranks - 1)
    rows = (_zb_v_rank(shape, rank, microbatches).truncate(shape.microbatches) for rank in range(shape.ranks))
    return Order(tuple(rows), shape.vee())


@schedule("dualpipe-v", weights="either", chunks=2)
def dualpipe_v(shape: Shape) -> Order:
    """DeepSeek's DualPipe (DeepSeek-V3, 2024) cut in half (Sea AI Lab, 2025): two stages per rank, in a V.

    The original overlaps a forward with a backward to hide communication; here they are consecutive, since sends do not
    block a rank. Only the first and the last backwards are split. The order is constructed for at least 2p microbatches
    and truncated.
    """
    microbatches = max(shape.microbatches, 2 * shape.ranks)
    rows = (_dualpipe_v_rank(shape, rank, microbatches).truncate(shape.microbatches) for rank in range(shape.ranks))
    return Order(tuple(rows), shape.vee())


def _zb_v_rank(shape: Shape, rank: int, microbatches: int) -> TaskList:
    """Return one rank of ZB-V: `down` is its stage in the first half of the V, `up` the one in the second."""
    tasks, ranks = TaskList(), shape.ranks
    down, up = rank, shape.stages - 1 - rank
    tasks.add("F" * (2 * (ranks - rank) - 1), down)
    for _ in range(rank):
        tasks.add("F", up)
        tasks.add("F", down)
    for _ in range(ranks - rank):
        tasks.add("FIW", up)
    while tasks.count("F", up) < microbatches:
        tasks.add("F" if tasks.count("F", down) < microbatches else "", down)
        tasks.add("IW", down)
        tasks.add("FIW", up)
    for _ in range(rank):
        tasks.add("I", down)
        tasks.add("I", up)
    for _ in range(ranks - rank):
        tasks.add("IW", down)
    for stage in (up, down):
        tasks.add("W" * (microbatches - tasks.count("W", stage)), stage)
    return tasks


def _dualpipe_v_rank(shape: Shape, rank: int, microbatches: int) -> TaskList:
    """Return one rank, by the steps of the published code; `down` and `up` as in `_zb_v_rank`."""
    tasks, later_ranks = TaskList(), shape.ranks - rank - 1
    down, up = rank, shape.stages - 1 - rank
    tasks.add("F" * (2 * later_ranks), down)
    for _ in range(rank + 1):
        tasks.add("F", down)
        tasks.add("F", up)
    for _ in range(later_ranks):
        tasks.add("IWF", up)
    for _ in range(microbatches - 2 * shape.ranks + rank + 1):
        tasks.add("F", down)
        tasks.add("B", up)
        tasks.add("F", up)
        tasks.add("B", down)
    for _ in range(later_ranks):
        tasks.add("BF", up)
        tasks.add("B", down)
    deferred = []
    for i in range(2 * (rank + 1)):
        stage = down if i % 2 else up
        tasks.add("B" if i <= rank else "I", stage)
        deferred += [stage] if i > rank else []
    for _ in range(later_ranks):
        tasks.add("W", deferred.pop(0))
        tasks.add("I", down)
        deferred.append(down)
    for stage in deferred:
        tasks.add("W", stage)
    return tasks
