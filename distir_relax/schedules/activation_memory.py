"""Activation memory of pipeline schedules: peaks and limits of ranks."""

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
    """The activation memory of ranks: `cap`, for all ranks or one for each, in the unit of `sizes`.

    `sizes` has the activations of one microbatch's forward for each stage. By default the unit is *stage activations*:
    those of one microbatch on a rank in all its chunks, which are equal. Raises `DistIRError` for numbers that are
    negative or not finite.
    """

    cap: Number | Sequence[Number]
    sizes: Sequence[Number] = ()

    def __post_init__(self) -> None:
        caps = self.cap if isinstance(self.cap, Sequence) else [self.cap]
        for number in (*caps, *self.sizes):
            if not number >= 0:
                raise DistIRError(f"memory and the sizes of activations are not negative, found {number}")

    def of(self, rank: int) -> Number:
        """Return the limit of a rank."""
        return exact(self.cap[rank] if isinstance(self.cap, Sequence) else self.cap)

    def check_shape(self, ranks: int, stages: int) -> None:
        """Raise `DistIRError` for caps of another number of ranks, or sizes of another number of stages."""
        if isinstance(self.cap, Sequence) and len(self.cap) != ranks:
            raise DistIRError(f"expected {ranks} caps of memory, one for each rank, found {len(self.cap)}")
        if self.sizes and len(self.sizes) != stages:
            raise DistIRError(f"expected {stages} sizes of activations, one for each stage, found {len(self.sizes)}")


def stage_sizes(stages: int, chunks: int, memory: Memory | None = None) -> tuple[Number, ...]:
    """Return the activations of one microbatch on each stage: those of `memory`, or equal parts of the unit."""
    return tuple(map(exact, memory.sizes)) if memory and memory.sizes else (_chunk_size(chunks),) * stages


def exact(number: Number) -> Number:
    """Convert a float to a fraction: sums of sizes are compared with caps, and must not depend on their order."""
    return Fraction(number) if isinstance(number, float) and math.isfinite(number) else number


def peak_activations(order: Order, memory: Memory | None = None) -> tuple[Number, ...]:
    """Return the activation peak of each rank, in stage activations or in the unit of the sizes of `memory`.

    A forward allocates its stage's activations when it begins; they are freed when the backward ends: ``B``, or ``W``
    if the backward is split. (What ``I`` could free already is assumed to equal the gradients that it leaves for
    ``W``.) Without backward tasks a forward frees its activations when it ends. So a peak depends on the order alone,
    not on times.
    """
    sizes = stage_sizes(order.stages, order.chunks, memory)
    peaks: list[Number] = []
    for tasks in order.tasks:
        allocated: Number = 0
        peak: Number = 0
        for task in tasks:
            if task.kind == "F":
                peak = max(peak, allocated + sizes[task.stage])
                allocated += sizes[task.stage] if order.trains else 0
            elif task.kind != "I":
                allocated -= sizes[task.stage]
        peaks.append(peak)
    return tuple(peaks)


def check_fits(order: Order, memory: Memory) -> None:
    """Raise `DistIRError` if a rank exceeds its limit; the error names the rank and both numbers."""
    memory.check_shape(order.ranks, order.stages)
    for rank, peak in enumerate(peak_activations(order, memory)):
        if peak > memory.of(rank):
            amount = f"activations of {float(peak):g}" if memory.sizes else f"{float(peak):g} stage activations"
            raise DistIRError(
                f"rank {rank} keeps {amount}, and may keep {float(memory.of(rank)):g}",
                hint='use the schedule "auto", which searches for one that fits, smaller microbatches, or checkpoints',
            )


def fits(order: Order, memory: Memory) -> bool:
    """Return whether no rank exceeds its limit."""
    return all(peak <= memory.of(rank) for rank, peak in enumerate(peak_activations(order, memory)))


def _chunk_size(chunks: int) -> Number:
    return Fraction(1, chunks) if chunks > 1 else 1
