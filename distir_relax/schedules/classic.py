"""Classic schedules: one piece per backward (GPipe, 1F1B, interleaved), and streaming for inference."""

from __future__ import annotations

from distir_relax.schedules.interleaved_order import interleaved_rounds
from distir_relax.schedules.registry import schedule
from distir_relax.schedules.task import Order, Shape, Task


@schedule("gpipe", chunks=None)
def gpipe(shape: Shape) -> Order:
    """All forwards, then all backwards (Huang et al., GPipe, 2019): each rank stores all microbatches at once.

    With several chunks, all microbatches go through one before the next (Lamy-Poirier, Breadth-First Pipeline
    Parallelism, 2023).
    """
    rank_of = shape.loop()

    def tasks(rank: int) -> tuple[Task, ...]:
        stages = range(rank, shape.stages, shape.ranks)
        forwards = [Task("F", stage, m) for stage in stages for m in range(shape.microbatches)]
        backwards = [Task("B", stage, m) for stage in reversed(stages) for m in range(shape.microbatches)]
        return (*forwards, *backwards)

    return Order(tuple(map(tasks, range(shape.ranks))), rank_of)


@schedule("1f1b")
def one_forward_one_backward(shape: Shape) -> Order:
    """One forward, one backward (Narayanan et al., PipeDream, 2019, with a flush): rank r stores p - r microbatches.

    Rank r runs p - r - 1 warm-up forwards, then alternates forward and backward, then runs the remaining backwards::

        0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
            1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
                2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
    """

    def tasks(rank: int) -> tuple[Task, ...]:
        forwards = [Task("F", rank, m) for m in range(shape.microbatches)]
        backwards = [Task("B", rank, m) for m in range(shape.microbatches)]
        return alternate(forwards, backwards, ahead=shape.ranks - rank - 1)

    return Order(tuple(map(tasks, range(shape.ranks))), shape.loop())


@schedule("interleaved", chunks=None)
def interleaved(shape: Shape) -> Order:
    """1F1B with several stages on each rank (Narayanan et al., Efficient Large-Scale Training on GPU Clusters, 2021).

    Microbatches go in rounds of about p: a rank runs those of a round through its first stage, then through its second,
    and only then continues with the next round. The bubble shrinks in proportion to the number of chunks. If p does not
    divide the microbatches, the sizes of rounds differ by one (and equal torch's where it supports the shape).
    """
    rounds = interleaved_rounds(shape)

    def tasks(rank: int) -> tuple[Task, ...]:
        forwards = [Task("F", chunk * shape.ranks + rank, m) for chunk, m in rounds.forwards()]
        backwards = [Task("B", chunk * shape.ranks + rank, m) for chunk, m in rounds.backwards()]
        return alternate(forwards, backwards, ahead=rounds.ahead + 2 * (shape.ranks - rank - 1))

    return Order(tuple(map(tasks, range(shape.ranks))), shape.loop())


@schedule("streaming", weights="none", chunks=None)
def streaming(shape: Shape) -> Order:
    """Inference: no backwards; each rank runs one microbatch after another, in rounds if it has several stages."""
    steps = list(interleaved_rounds(shape).forwards())
    tasks = (tuple(Task("F", chunk * shape.ranks + rank, m) for chunk, m in steps) for rank in range(shape.ranks))
    return Order(tuple(tasks), shape.loop())


def alternate(forwards: list[Task], backwards: list[Task], ahead: int) -> tuple[Task, ...]:
    """Return `ahead` forwards, then a forward and a backward alternately, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    tasks = forwards[:ahead]
    for i, backward in enumerate(backwards):
        tasks += forwards[ahead + i : ahead + i + 1]
        tasks.append(backward)
    return tuple(tasks)
