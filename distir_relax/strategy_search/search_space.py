"""Search space: the candidate strategies for a number of devices and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.schedules import schedule_named
from distir_relax.strategies.strategy import Strategy

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, and the number of samples in a step."""

    strategy: Strategy
    samples: int

    @property
    def microbatch(self) -> int:
        """Return the samples of the largest microbatch, over all data-parallel ranks."""
        return -(-self.samples // self.strategy.microbatches)


@dataclass(frozen=True, slots=True)
class Space:
    """All strategies on `devices` devices for steps of `batches` samples.

    D x T x P are all factorizations of `devices`. A pipeline has each number of `microbatches` except 1; without a
    pipeline there is one microbatch or, if the model is `trained`, each of these numbers. Every microbatch has at least
    a sample for each data-parallel rank. `schedules`, `chunks`, `zero`, `checkpoint` and `sequence_parallel` are tried
    where they make a difference. With ``auto`` in `placements` the stages are also sharded by optimization, on meshes
    of D by T devices: then 1 by n is n by 1.

    Raises `DistIRError` for numbers below 1, and for invalid values of a `Strategy`.
    """

    devices: int
    batches: tuple[int, ...]
    trained: bool = False
    microbatches: tuple[int, ...] = POWERS
    schedules: tuple[str, ...] = ("1f1b",)
    chunks: tuple[int, ...] = (1,)
    zero: tuple[int, ...] = (0,)
    checkpoint: tuple[str, ...] = ("none",)
    sequence_parallel: tuple[bool, ...] = (False,)
    placements: tuple[str, ...] = ("rules",)

    def __post_init__(self) -> None:
        if min(self.devices, *self.batches, *self.microbatches, *self.chunks) < 1:
            raise DistIRError("devices, batches, microbatches and chunks are at least 1")
        for schedule in self.schedules:
            schedule_named(schedule)
        for placements in self.placements:
            Strategy(placements=placements)

    def candidates(self) -> list[Candidate]:
        """Return all candidates in a fixed order; those of similar programs are consecutive."""
        candidates: dict[Candidate, None] = {}
        for degrees in degrees_of(self.devices):
            rules = self._options(*degrees) if "rules" in self.placements else ()
            for options in chain(rules, self._auto_options(*degrees)):
                for samples, count in product(self.batches, self._microbatch_counts(degrees[2])):
                    if samples // (degrees[0] * count) >= 1:
                        candidates[Candidate(Strategy(*degrees, count, **options), samples)] = None
        return list(candidates)

    def _microbatch_counts(self, pipeline: int) -> Sequence[int]:
        if pipeline == 1:
            return self.microbatches if self.trained else (1,)
        return tuple(count for count in self.microbatches if count > 1) or (1,)

    def _auto_options(self, data: int, tensor: int, pipeline: int) -> Iterator[dict[str, Any]]:
        """Yield the options of strategies with autosharded stages."""
        by_rules = "rules" in self.placements
        if "auto" not in self.placements or (tensor == 1 and (data > 1 or by_rules)):
            return
        for options in self._options(1, 1, pipeline):
            yield {**options, "placements": "auto"}

    def _options(self, data: int, tensor: int, pipeline: int) -> Iterator[dict[str, Any]]:
        zero = self.zero if data > 1 and self.trained else (0,)
        checkpoint = self.checkpoint if self.trained else ("none",)
        sequence = self.sequence_parallel if tensor > 1 else (False,)
        orders = product(self.schedules, self.chunks) if pipeline > 1 else [("1f1b", 1)]
        for (schedule, chunks), stage, mode, split in product(list(orders), zero, checkpoint, sequence):
            entry = schedule_named(schedule)
            is_valid = entry.chunks in (None, chunks) and (entry.weights == "none") <= (not self.trained)
            if is_valid:
                yield {
                    "schedule": schedule, "chunks": chunks, "zero": stage, "checkpoint": mode,
                    "sequence_parallel": split,
                }  # fmt: skip


def degrees_of(devices: int) -> list[tuple[int, int, int]]:
    """Return all D, T, P whose product is `devices`: 15 for 16."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return [(d, t, devices // (d * t)) for d in divisors for t in divisors if devices // d % t == 0]
