"""Times of the tasks of a schedule, in any unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TypeAlias

from distir_relax.errors import DistIRError
from distir_relax.schedules.task import Kind, Task

Number: TypeAlias = int | float | Fraction
"""A time or a size. Results of integers and fractions are exact."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of tasks: a number for all stages, or one for each.

    `inputs` is the time of the gradients of a stage's inputs (``I``), `weights` of those of its weights (``W``); a
    whole backward takes both. `send` is the time to send a stage's result to the next stage, or its gradient back, if
    these are on different ranks. `factors`, if given, has for each microbatch the factor of all its times: ``(1, 1,
    Fraction(1, 2))`` if the last has half as many samples. Raises `DistIRError` for negative times.
    """

    forward: Number | Sequence[Number] = 1
    inputs: Number | Sequence[Number] = 1
    weights: Number | Sequence[Number] = 1
    send: Number | Sequence[Number] = 0
    factors: Sequence[Number] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            for number in value if isinstance(value, Iterable) else (value,):
                if not number >= 0 or number == float("inf"):
                    raise DistIRError(f"the times of tasks are finite and not negative, found {item.name} {value}")

    def of(self, task: Task) -> Number:
        """Return the time of a task."""
        return self.base(task.kind, task.stage) * self.factor(task.microbatch)

    def base(self, kind: Kind, stage: int) -> Number:
        """Return the time of a task of a microbatch with factor 1."""
        match kind:
            case "F":
                return _of_stage(self.forward, stage)
            case "I":
                return _of_stage(self.inputs, stage)
            case "W":
                return _of_stage(self.weights, stage)
            case "B":
                return _of_stage(self.inputs, stage) + _of_stage(self.weights, stage)

    def send_time(self, stage: int, microbatch: int) -> Number:
        """Return the time to send between `stage` and the next, either way."""
        return _of_stage(self.send, stage) * self.factor(microbatch)

    def factor(self, microbatch: int) -> Number:
        """Return the factor of the times of a microbatch."""
        return self.factors[microbatch] if self.factors else 1

    def check_shape(self, stages: int, microbatches: int) -> None:
        """Raise `DistIRError` for times of other numbers of stages or microbatches."""
        for name in ("forward", "inputs", "weights", "send"):
            value = getattr(self, name)
            # The last stage sends nothing.
            if isinstance(value, Sequence) and len(value) != stages and (name, len(value)) != ("send", stages - 1):
                raise DistIRError(f"expected {stages} times {name}, one for each stage, found {len(value)}")
        if self.factors and len(self.factors) != microbatches:
            expected = f"expected {microbatches} factors of times, one for each microbatch"
            raise DistIRError(f"{expected}, found {len(self.factors)}")


EQUAL = Times()
"""All tasks take 1, sends 0."""


def _of_stage(value: Number | Sequence[Number], stage: int) -> Number:
    return value[stage] if isinstance(value, Sequence) else value
