"""Zero-bubble schedules: weight gradients, on which no other stage depends, fill idle time.

Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from distir_relax.schedules.registry import schedule
from distir_relax.schedules.task import Order, Shape, Task
from distir_relax.schedules.task_list import TaskList


@schedule("zb-h1", weights="apart")
def zb_h1(shape: Shape) -> Order:
    """1F1B with deferred weight gradients: no rank stores more than rank 0 of 1F1B, p stage activations.

    Rank r is p - r - 1 forwards ahead of its gradients of inputs, and these are r ahead of its gradients of weights::

        0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
            1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
                2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    ranks = range(shape.ranks)
    return Order(tuple(_alternate(shape, rank, shape.ranks - rank - 1, rank) for rank in ranks), shape.loop())


@schedule("zb-h2", weights="apart")
def zb_h2(shape: Shape) -> Order:
    """Twice as far ahead as ZB-H1, with 2p - 1 stage activations: a rank that has begun is never idle if F = I = W.

    Rank r is 2(p - r - 1) forwards ahead of its gradients of inputs, and these are 2r ahead of those of weights::

        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
            1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
                2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
    """
    ranks = range(shape.ranks)
    return Order(tuple(_alternate(shape, rank, 2 * (shape.ranks - rank - 1), 2 * rank) for rank in ranks), shape.loop())


def _alternate(shape: Shape, rank: int, ahead: int, behind: int) -> tuple[Task, ...]:
    """Run forwards `ahead` of input gradients, weight gradients `behind` them, alternating."""
    microbatches, tasks = shape.microbatches, TaskList()
    tasks.add("F" * min(ahead, microbatches), rank)
    for i in range(microbatches):
        tasks.add("F" if ahead + i < microbatches else "", rank)
        tasks.add("IW" if i >= behind else "I", rank)
    tasks.add("W" * min(behind, microbatches), rank)
    return tasks.truncate(microbatches)
