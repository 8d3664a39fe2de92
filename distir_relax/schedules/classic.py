"""Schedules with one stage on a rank and backwards in one piece, and the one for inference."""

from __future__ import annotations

from distir_relax.schedules.interleaved_order import through_chunks
from distir_relax.schedules.registry import schedule
from distir_relax.schedules.task import Order, Shape, Task


@schedule("gpipe", chunks=None)
def gpipe(shape: Shape) -> Order:
    """All forwards, then all backwards (Huang et al., GPipe, 2019): each rank keeps all microbatches at once.

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
    """One forward, one backward (Narayanan et al., PipeDream, 2019, with a flush): rank r keeps p - r microbatches.

    Rank r does p - r - 1 forwards to warm up, then a forward and a backward in turn, then the backwards that are left::

        0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
            1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
                2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
    """

    def tasks(rank: int) -> tuple[Task, ...]:
        forwards = [Task("F", rank, m) for m in range(shape.microbatches)]
        backwards = [Task("B", rank, m) for m in range(shape.microbatches)]
        return in_turns(forwards, backwards, ahead=shape.ranks - rank - 1)

    return Order(tuple(map(tasks, range(shape.ranks))), shape.loop())


@schedule("interleaved", chunks=None)
def interleaved(shape: Shape) -> Order:
    """1F1B with several stages on each rank (Narayanan et al., Efficient Large-Scale Training on GPU Clusters, 2021).

    Microbatches go in rounds of about p: a rank takes those of a round through its first stage, then through its
    second, and only then goes on to the next round. A bubble is as long as one stage, so shorter by as many times as
    there are chunks. Where p does not divide the microbatches, rounds differ by one (and are torch's where it has any).
    """
    rounds = through_chunks(shape)

    def tasks(rank: int) -> tuple[Task, ...]:
        forwards = [Task("F", chunk * shape.ranks + rank, m) for chunk, m in rounds.forwards()]
        backwards = [Task("B", chunk * shape.ranks + rank, m) for chunk, m in rounds.backwards()]
        return in_turns(forwards, backwards, ahead=rounds.ahead + 2 * (shape.ranks - rank - 1))

    return Order(tuple(map(tasks, range(shape.ranks))), shape.loop())


@schedule("streaming", weights="none", chunks=None)
def streaming(shape: Shape) -> Order:
    """Inference: no backwards, each rank does microbatch after microbatch, in rounds where it has several stages."""
    steps = list(through_chunks(shape).forwards())
    tasks = (tuple(Task("F", chunk * shape.ranks + rank, m) for chunk, m in steps) for rank in range(shape.ranks))
    return Order(tuple(tasks), shape.loop())


def in_turns(forwards: list[Task], backwards: list[Task], ahead: int) -> tuple[Task, ...]:
    """Forwards are `ahead` of backwards by so many; then one of each in turn, as long as there are forwards."""
    ahead = min(ahead, len(forwards))
    found = forwards[:ahead]
    for i, backward in enumerate(backwards):
        found += forwards[ahead + i : ahead + i + 1]
        found.append(backward)
    return tuple(found)
