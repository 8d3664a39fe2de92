"""What ranks keep between forward and backward, and what they may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Order
from distir_relax.schedules.task_times import Number


@dataclass(frozen=True, slots=True)
class Memory:
    """What each rank may keep: `cap`, for all ranks or one for each, in the unit of `sizes`.

    `sizes` has for each stage what one microbatch's forward keeps. Without, the unit is *stage activations*: what the
    forward of one microbatch keeps on a rank in all its chunks, which are equal. Raises `DistIRError` for numbers that
    are negative or not finite.
    """

    cap: Number | Sequence[Number]
    sizes: Sequence[Number] = ()

    def __post_init__(self) -> None:
        caps = self.cap if isinstance(self.cap, Sequence) else [self.cap]
        for number in (*caps, *self.sizes):
            if not number >= 0:
                raise DistIRError(f"memory and the sizes of activations are not negative, found {number}")

    def of(self, rank: int) -> Number:
        """What a rank may keep."""
        return exact(self.cap[rank] if isinstance(self.cap, Sequence) else self.cap)

    def fit(self, ranks: int, stages: int) -> None:
        """Raises `DistIRError` where there are caps for another number of ranks, or sizes for another of stages."""
        if isinstance(self.cap, Sequence) and len(self.cap) != ranks:
            raise DistIRError(f"expected {ranks} caps of memory, one for each rank, found {len(self.cap)}")
        if self.sizes and len(self.sizes) != stages:
            raise DistIRError(f"expected {stages} sizes of activations, one for each stage, found {len(self.sizes)}")


def stage_sizes(stages: int, chunks: int, memory: Memory | None = None) -> tuple[Number, ...]:
    """What the forward of one microbatch keeps on each stage: given sizes, or equal parts of a stage activation."""
    return tuple(map(exact, memory.sizes)) if memory and memory.sizes else (_equal(chunks),) * stages


def exact(number: Number) -> Number:
    """A float as the fraction that it is: sums of sizes are compared with caps, and must not depend on their order."""
    return Fraction(number) if isinstance(number, float) and math.isfinite(number) else number


def peak_activations(order: Order, memory: Memory | None = None) -> tuple[Number, ...]:
    """The most that each rank keeps at once, in stage activations or in the unit of the sizes of `memory`.

    A forward takes its stage's activations when it begins, and they count as whole until the backward gives them back
    when it ends: ``B``, or ``W`` where the backward is split. (What ``I`` could let go of already is taken to be as
    much as the gradients that it leaves for ``W``.) In an order without backward tasks a forward gives back what it
    took when it ends. So a peak depends on the order alone, not on times.
    """
    sizes = stage_sizes(order.stages, order.chunks, memory)
    peaks: list[Number] = []
    for tasks in order.tasks:
        kept: Number = 0
        peak: Number = 0
        for task in tasks:
            if task.kind == "F":
                peak = max(peak, kept + sizes[task.stage])
                kept += sizes[task.stage] if order.trains else 0
            elif task.kind != "I":
                kept -= sizes[task.stage]
        peaks.append(peak)
    return tuple(peaks)


def check_fits(order: Order, memory: Memory) -> None:
    """Raise `DistIRError` where a rank keeps more than it may; the error names the rank and both numbers."""
    memory.fit(order.ranks, order.stages)
    for rank, peak in enumerate(peak_activations(order, memory)):
        if peak > memory.of(rank):
            found = f"activations of {float(peak):g}" if memory.sizes else f"{float(peak):g} stage activations"
            raise DistIRError(
                f"rank {rank} keeps {found}, and may keep {float(memory.of(rank)):g}",
                hint='take the schedule "auto", which looks for one that fits, smaller microbatches, or checkpoints',
            )


def fits(order: Order, memory: Memory) -> bool:
    """Whether no rank keeps more than it may."""
    return all(peak <= memory.of(rank) for rank, peak in enumerate(peak_activations(order, memory)))


def _equal(chunks: int) -> Number:
    return Fraction(1, chunks) if chunks > 1 else 1
