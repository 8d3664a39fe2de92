"""V-shaped schedules: two stages on a rank, there and back, so that a microbatch ends on the rank where it began."""

from __future__ import annotations

from distir_relax.schedules.registry import schedule
from distir_relax.schedules.task import Order, Shape
from distir_relax.schedules.task_list import Counted


@schedule("zb-v", weights="apart", chunks=2)
def zb_v(shape: Shape) -> Order:
    """ZB-V (Qi et al., Pipeline Parallelism with Controllable Memory, 2024): ranks keep p stage activations each.

    Rank 0 has the first stage and the last, so that gradients come back to it at once. The order is one for at least
    2p - 1 microbatches; those that are too many are left out.
    """
    enough = max(shape.microbatches, 2 * shape.ranks - 1)
    rows = (_zb_v_rank(shape, rank, enough).first(shape.microbatches) for rank in range(shape.ranks))
    return Order(tuple(rows), shape.vee())


@schedule("dualpipe-v", weights="either", chunks=2)
def dualpipe_v(shape: Shape) -> Order:
    """DeepSeek's DualPipe (DeepSeek-V3, 2024) cut in half (Sea AI Lab, 2025): two stages on a rank, there and back.

    Where the original runs a forward and a backward at once, to hide what they send, they are one after the other here:
    sends do not hold up a rank. Only the first and the last backwards are split. The order is one for at least 2p
    microbatches; those that are too many are left out.
    """
    enough = max(shape.microbatches, 2 * shape.ranks)
    rows = (_dualpipe_v_rank(shape, rank, enough).first(shape.microbatches) for rank in range(shape.ranks))
    return Order(tuple(rows), shape.vee())


def _zb_v_rank(shape: Shape, rank: int, microbatches: int) -> Counted:
    """One rank of ZB-V: `down` is its stage on the way there, `up` the one on the way back."""
    found, ranks = Counted(), shape.ranks
    down, up = rank, shape.stages - 1 - rank
    found.add("F" * (2 * (ranks - rank) - 1), down)
    for _ in range(rank):
        found.add("F", up)
        found.add("F", down)
    for _ in range(ranks - rank):
        found.add("FIW", up)
    while found.count("F", up) < microbatches:
        found.add("F" if found.count("F", down) < microbatches else "", down)
        found.add("IW", down)
        found.add("FIW", up)
    for _ in range(rank):
        found.add("I", down)
        found.add("I", up)
    for _ in range(ranks - rank):
        found.add("IW", down)
    for stage in (up, down):
        found.add("W" * (microbatches - found.count("W", stage)), stage)
    return found


def _dualpipe_v_rank(shape: Shape, rank: int, microbatches: int) -> Counted:
    """The steps of the published code. `down` is the rank's stage on the way there, `up` the one on the way back."""
    found, behind = Counted(), shape.ranks - rank - 1
    down, up = rank, shape.stages - 1 - rank
    found.add("F" * (2 * behind), down)
    for _ in range(rank + 1):
        found.add("F", down)
        found.add("F", up)
    for _ in range(behind):
        found.add("IWF", up)
    for _ in range(microbatches - 2 * shape.ranks + rank + 1):
        found.add("F", down)
        found.add("B", up)
        found.add("F", up)
        found.add("B", down)
    for _ in range(behind):
        found.add("BF", up)
        found.add("B", down)
    late = []
    for i in range(2 * (rank + 1)):
        stage = down if i % 2 else up
        found.add("B" if i <= rank else "I", stage)
        late += [stage] if i > rank else []
    for _ in range(behind):
        found.add("W", late.pop(0))
        found.add("I", down)
        late.append(down)
    for stage in late:
        found.add("W", stage)
    return found
