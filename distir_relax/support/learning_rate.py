"""Learning rate schedules as data, for optimizers, bundles and training runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.support import Fields, is_finite


class Schedule(ABC):
    """A learning rate for each step, counted from 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the rate of a step."""


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """The same rate at every step. Raises `DistIRError` for a rate below 0."""

    lr: float

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return self.lr


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Cosine decay from `lr` to `least` at step `steps`, after a linear warmup over the first `warmup` steps.

    Loshchilov and Hutter, SGDR, 2016, without restarts. The last warmup step has the rate `lr`. Raises
    `DistIRError` for rates below 0, and if `steps` are not more than `warmup`.
    """

    lr: float
    steps: int
    warmup: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        _check_fall(self.lr, self.steps, self.warmup, self.least)

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.warmup:
            return _risen(self.lr, step, self.warmup)
        factor = (1 + math.cos(math.pi * _passed(step, self.steps, self.warmup))) / 2
        return self.least + (self.lr - self.least) * factor


@dataclass(frozen=True, slots=True)
class Linear(Schedule):
    """Linear decay from `lr` to `least` at step `steps`, after a linear warmup over the first `warmup` steps.

    Raises `DistIRError` as `Cosine` does.
    """

    lr: float
    steps: int
    warmup: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        _check_fall(self.lr, self.steps, self.warmup, self.least)

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.warmup:
            return _risen(self.lr, step, self.warmup)
        return self.lr + (self.least - self.lr) * _passed(step, self.steps, self.warmup)


@dataclass(frozen=True, slots=True)
class StepDecay(Schedule):
    """The rate multiplied by `factor` after each `every` steps. Raises `DistIRError` for numbers below 0."""

    lr: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_rate(self.factor, "a factor")
        if self.every < 1:
            raise DistIRError(f"expected a rate that falls after at least one step, found every={self.every}")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return self.lr * self.factor ** (step // self.every)


def as_schedule(lr: float | Schedule) -> Schedule:
    """Return a schedule unchanged, and a number as a constant one. Raises `DistIRError` for a number below 0."""
    return lr if isinstance(lr, Schedule) else Constant(float(lr))


def _risen(lr: float, step: int, warmup: int) -> float:
    return lr * (step + 1) / warmup


def _passed(step: int, steps: int, warmup: int) -> float:
    """Return the completed fraction of the decay, from 0 to 1."""
    return min(1.0, (step - warmup) / (steps - warmup))


def _check_rate(rate: float, what: str = "a learning rate") -> None:
    if not 0 <= rate < math.inf:
        raise DistIRError(f"expected {what} of at least 0, found {rate}")


def _check_fall(lr: float, steps: int, warmup: int, least: float) -> None:
    _check_rate(lr)
    _check_rate(least)
    if not 0 <= warmup < steps:
        raise DistIRError(
            f"expected more steps than there are of warm-up, found steps={steps}, warmup={warmup}",
            hint="steps counts all steps, those of the warm-up included",
        )


_KINDS: dict[str, type[Schedule]] = {kind.__name__: kind for kind in (Constant, Cosine, Linear, StepDecay)}


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as a table of its kind and fields. Raises `DistIRError` for a user-defined class."""
    if _KINDS.get(type(schedule).__name__) is not type(schedule):
        raise DistIRError(
            f"a bundle holds a learning rate of {', '.join(_KINDS)}, found {type(schedule).__name__}",
            hint="give one of these, or train with a Session and a learning rate of your own at each step",
        )
    assert is_dataclass(schedule)
    return {"kind": type(schedule).__name__, **{f.name: getattr(schedule, f.name) for f in fields(schedule)}}


def schedule_from_json(table: Fields) -> Schedule:
    """Parse the result of `schedule_to_json`. Raises the table's error for an unknown kind and for invalid fields."""
    name = table.text("kind")
    if name not in _KINDS:
        raise table.refuse(f"one of {', '.join(_KINDS)}", "kind", name)
    kind: Any = _KINDS[name]
    values: dict[str, Any] = {}
    for item in fields(kind):
        if item.type == "int":
            values[item.name] = table.whole(item.name)
        elif is_finite(value := table.table.get(item.name)):
            values[item.name] = value
        else:
            raise table.refuse("a number", item.name, value)
    try:
        schedule: Schedule = kind(**values)
    except DistIRError as wrong:
        raise table.error(wrong.message, table.where) from None
    return schedule
