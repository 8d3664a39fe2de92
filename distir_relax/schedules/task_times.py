"""How long the tasks of a schedule take, in any unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TypeAlias

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Kind, Task

Number: TypeAlias = int | float | Fraction
"""A time or a size. What is computed from whole numbers and fractions is exact."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long tasks take: a number for all stages, or one for each.

    `inputs` is how long the gradients of a stage's inputs take (``I``), `weights` those of its weights (``W``); a whole
    backward takes both. `send` is how long a stage's result takes to the next stage, and its gradient back, where these
    are on different ranks. `factors`, if given, has a number for each microbatch by which all its times are multiplied:
    ``(1, 1, Fraction(1, 2))`` where the last has half as many samples. Raises `DistIRError` for negative times.
    """

    forward: Number | Sequence[Number] = 1
    inputs: Number | Sequence[Number] = 1
    weights: Number | Sequence[Number] = 1
    send: Number | Sequence[Number] = 0
    factors: Sequence[Number] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            given = getattr(self, item.name)
            for number in given if isinstance(given, Iterable) else (given,):
                if not number >= 0 or number == float("inf"):
                    raise DistIRError(f"the times of tasks are finite and not negative, found {item.name} {given}")

    def of(self, task: Task) -> Number:
        """How long a task takes."""
        return self.of_whole(task.kind, task.stage) * self.factor(task.microbatch)

    def of_whole(self, kind: Kind, stage: int) -> Number:
        """How long a task takes of a microbatch with the factor 1."""
        match kind:
            case "F":
                return _at(self.forward, stage)
            case "I":
                return _at(self.inputs, stage)
            case "W":
                return _at(self.weights, stage)
            case "B":
                return _at(self.inputs, stage) + _at(self.weights, stage)

    def between(self, stage: int, microbatch: int) -> Number:
        """How long it takes to send between `stage` and the next, either way."""
        return _at(self.send, stage) * self.factor(microbatch)

    def factor(self, microbatch: int) -> Number:
        """By what the times of a microbatch are multiplied."""
        return self.factors[microbatch] if self.factors else 1

    def fit(self, stages: int, microbatches: int) -> None:
        """Raises `DistIRError` where there are times for other numbers of stages or of microbatches."""
        for name in ("forward", "inputs", "weights", "send"):
            given = getattr(self, name)
            # What the last stage makes is sent nowhere.
            if isinstance(given, Sequence) and len(given) != stages and (name, len(given)) != ("send", stages - 1):
                raise DistIRError(f"expected {stages} times {name}, one for each stage, found {len(given)}")
        if self.factors and len(self.factors) != microbatches:
            expected = f"expected {microbatches} factors of times, one for each microbatch"
            raise DistIRError(f"{expected}, found {len(self.factors)}")


EQUAL = Times()
"""All tasks take 1, sends nothing."""


def _at(given: Number | Sequence[Number], stage: int) -> Number:
    return given[stage] if isinstance(given, Sequence) else given
