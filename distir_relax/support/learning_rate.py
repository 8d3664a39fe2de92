"""Learning rate schedules as data, for optimizers, bundles and training runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.support import Fields, is_finite

RATE, MOMENTUM = "learning_rate", "momentum"
"""A program's inputs for its learning rate and for a momentum with a schedule; further ones are ``learning_rate.1``."""


class Schedule(ABC):
    """A learning rate for each step, counted from 0."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the rate of a step."""


LearningRate = float | Schedule | Callable[[int], float]
"""A rate of an optimizer: a number, a schedule, or a function of the step, counted from 0."""


@dataclass(frozen=True, slots=True)
class Computed(Schedule):
    """The rates that a function of the step returns, which is called in each step; a bundle cannot hold it.

    Raises `DistIRError` if it does not return a number of at least 0, for the first step at once.
    """

    function: Callable[[int], float]

    def __post_init__(self) -> None:
        self(0)

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        rate = self.function(step)
        try:
            number = float(rate)
        except (TypeError, ValueError):
            raise DistIRError(f"expected a function that returns the rate of a step, found {rate!r}", "lr") from None
        _check_rate(number)
        return number


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """The same rate at every step, after a linear warmup over the first `warmup` steps.

    Raises `DistIRError` for numbers below 0.
    """

    lr: float
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_count(self.warmup, "warmup", least=0)

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return _risen(self.lr, step, self.warmup) if step < self.warmup else self.lr


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
        return _by_cosine(self.lr, self.least, _passed(step, self.steps, self.warmup))


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


@dataclass(frozen=True, slots=True)
class MultiStep(Schedule):
    """The rate multiplied by `factor` at each of the steps `at`: `torch.optim.lr_scheduler.MultiStepLR`.

    Raises `DistIRError` for numbers below 0.
    """

    lr: float
    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_rate(self.factor, "a factor")
        for step in self.at:
            _check_count(step, "a step of at")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return self.lr * self.factor ** sum(step >= begin for begin in self.at)


@dataclass(frozen=True, slots=True)
class Exponential(Schedule):
    """The rate multiplied by `factor` after each step, after a linear warmup over the first `warmup` steps.

    Raises `DistIRError` for numbers below 0.
    """

    lr: float
    factor: float
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_rate(self.factor, "a factor")
        _check_count(self.warmup, "warmup", least=0)

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.warmup:
            return _risen(self.lr, step, self.warmup)
        return self.lr * self.factor ** (step - self.warmup)


@dataclass(frozen=True, slots=True)
class Polynomial(Schedule):
    """Decay from `lr` to `least` at step `steps` by a power of the steps that remain, after a linear warmup.

    Raises `DistIRError` as `Cosine` does.
    """

    lr: float
    steps: int
    warmup: int = 0
    least: float = 0.0
    power: float = 2.0

    def __post_init__(self) -> None:
        _check_fall(self.lr, self.steps, self.warmup, self.least)
        _check_rate(self.power, "a power")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.warmup:
            return _risen(self.lr, step, self.warmup)
        remaining = 1 - _passed(step, self.steps, self.warmup)
        return self.least + (self.lr - self.least) * float(remaining**self.power)


@dataclass(frozen=True, slots=True)
class InverseSqrt(Schedule):
    """A linear warmup to `lr`, then decay by the inverse square root of the step.

    Vaswani et al., Attention Is All You Need, 2017. Raises `DistIRError` for a rate below 0, and for no warmup.
    """

    lr: float
    warmup: int

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_count(self.warmup, "warmup")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        number = step + 1
        return self.lr * min(number / self.warmup, math.sqrt(self.warmup / number))


@dataclass(frozen=True, slots=True)
class CosineRestarts(Schedule):
    """Cosine decay from `lr` to `least` in `period` steps, again and again; each period is `growth` times the last.

    Loshchilov and Hutter, SGDR, 2016: `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`. Raises `DistIRError` for
    rates below 0, and for a period or a growth below 1.
    """

    lr: float
    period: int
    growth: int = 1
    least: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_rate(self.least)
        _check_count(self.period, "period")
        _check_count(self.growth, "growth")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        period = self.period
        while self.growth > 1 and step >= period:
            step -= period
            period *= self.growth
        return _by_cosine(self.lr, self.least, (step % period) / period)


@dataclass(frozen=True, slots=True)
class OneCycle(Schedule):
    """A cosine from ``lr / start`` to `lr` in the fraction `rise` of `steps`, then one to ``lr / start / end``.

    Smith and Topin, Super-Convergence, 2018: `torch.optim.lr_scheduler.OneCycleLR`. Raises `DistIRError` for fewer than
    two steps, a rate below 0, a fraction that is not between 0 and 1, and factors not above 0.
    """

    lr: float
    steps: int
    rise: float = 0.3
    start: float = 25.0
    end: float = 1e4

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_count(self.steps, "steps", least=2)
        if not 0 < self.rise < 1:
            raise DistIRError(f"expected a rise between 0 and 1, found {self.rise}")
        for name, factor in (("start", self.start), ("end", self.end)):
            if not 0 < factor < math.inf:
                raise DistIRError(f"expected {name} above 0, found {factor}")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        top, last = self.rise * self.steps - 1, self.steps - 1
        first = self.lr / self.start
        if step <= top:
            return _by_cosine(first, self.lr, step / top if top > 0 else 1.0)
        return _by_cosine(self.lr, first / self.end, min(1.0, (step - top) / (last - top)))

    def momentum(self, least: float = 0.85, most: float = 0.95) -> OneCycle:
        """Return the schedule of a momentum that is `least` where the rate is highest, and `most` at both ends.

        The defaults are torch's. Raises `DistIRError` unless 0 < `least` <= `most` < 1.
        """
        if not 0 < least <= most < 1:
            raise DistIRError(
                f"expected momenta between 0 and 1, the first not above the second, found {least}, {most}"
            )
        return OneCycle(least, self.steps, self.rise, least / most, 1.0)


@dataclass(frozen=True, slots=True)
class WarmupStableDecay(Schedule):
    """A linear warmup to `lr`, the same rate, and a linear decay to `least` in the last `decay` of `steps` steps.

    Hu et al., MiniCPM, 2024. Raises `DistIRError` for rates below 0, and for fewer steps than both phases have.
    """

    lr: float
    steps: int
    decay: int
    warmup: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        _check_fall(self.lr, self.steps, self.warmup, self.least)
        _check_count(self.decay, "decay")
        if self.warmup + self.decay > self.steps:
            raise DistIRError(
                f"expected at least as many steps as warm-up and decay have, found steps={self.steps}, "
                f"warmup={self.warmup}, decay={self.decay}"
            )

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.warmup:
            return _risen(self.lr, step, self.warmup)
        passed = min(1.0, max(0.0, (step - self.steps + self.decay) / self.decay))
        return self.lr + (self.least - self.lr) * passed


@dataclass(frozen=True, slots=True)
class Tabulated(Schedule):
    """The rates of the first steps; later ones have the last of them. Raises `DistIRError` for none, and below 0."""

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates:
            raise DistIRError("expected the rates of one or more steps, found none")
        for rate in self.rates:
            _check_rate(rate)

    @classmethod
    def of(cls, function: Callable[[int], float], steps: int) -> Tabulated:
        """Return the rates that a function of the step, counted from 0, has for the first `steps` of them."""
        _check_count(steps, "steps")
        return cls(tuple(float(function(step)) for step in range(steps)))

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return self.rates[min(step, len(self.rates) - 1)]


@dataclass(frozen=True, slots=True)
class ByEpoch(Schedule):
    """The rate of a schedule that counts epochs, each of which has `steps` steps: ``ByEpoch(StepDecay(0.1, 30), 500)``.

    Raises `DistIRError` for a number of steps below 1, and for a schedule that is none.
    """

    schedule: Schedule
    steps: int

    def __post_init__(self) -> None:
        _check_count(self.steps, "steps")
        if not isinstance(self.schedule, Schedule) or isinstance(self.schedule, ByEpoch):
            found = type(self.schedule).__name__
            raise DistIRError(f"expected a schedule of steps to count epochs, such as StepDecay, found {found}")

    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return self.schedule(step // self.steps)


def is_of_kind(name: str, kind: str = RATE) -> bool:
    """Return whether an input of a program that has a schedule is a learning rate, or of another kind."""
    return name.partition(".")[0] == kind


def as_schedule(lr: LearningRate) -> Schedule:
    """Return a schedule unchanged, a number as a constant one, and a function as one that calls it.

    Raises `DistIRError` for a number below 0.
    """
    if isinstance(lr, Schedule):
        return lr
    return Computed(lr) if callable(lr) else Constant(float(lr))


def describe_schedule(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as a table to show and to compare: of a function, or a class of the user's, the name alone."""
    if type(schedule) in SCHEDULES:
        return schedule_to_json(schedule)
    named = schedule.function if isinstance(schedule, Computed) else type(schedule)
    return {"kind": getattr(named, "__qualname__", type(named).__name__)}


def _risen(lr: float, step: int, warmup: int) -> float:
    return lr * (step + 1) / warmup


def _passed(step: int, steps: int, warmup: int) -> float:
    """Return the completed fraction of the decay, from 0 to 1."""
    return min(1.0, (step - warmup) / (steps - warmup))


def _by_cosine(first: float, last: float, passed: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * passed)) / 2


def _check_count(count: int, name: str, least: int = 1) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise DistIRError(f"expected {name} to be a whole number of at least {least}, found {count!r}")


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


SCHEDULES: tuple[type[Schedule], ...] = (
    *(ByEpoch, Constant, Cosine, CosineRestarts, Exponential, InverseSqrt, Linear, MultiStep, OneCycle, Polynomial),
    *(StepDecay, Tabulated, WarmupStableDecay),
)
"""The schedules that a bundle may hold."""
_KINDS: dict[str, type[Schedule]] = {kind.__name__: kind for kind in SCHEDULES}


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as a table of its kind and fields. Raises `DistIRError` for a user-defined class."""
    if _KINDS.get(type(schedule).__name__) is not type(schedule):
        raise DistIRError(
            f"a bundle holds a learning rate of {', '.join(_KINDS)}, found {type(schedule).__name__}",
            hint="record its rates: dr.lr.Tabulated.of(function, steps); dr.train of a step needs no bundle",
        )
    assert is_dataclass(schedule)
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    return {
        "kind": type(schedule).__name__,
        **{name: schedule_to_json(value) if isinstance(value, Schedule) else value for name, value in values.items()},
    }


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
        elif item.type == "Schedule":
            values[item.name] = schedule_from_json(table.fields(item.name))
        elif item.type == "tuple[int, ...]":
            values[item.name] = table.wholes(item.name)
        elif item.type == "tuple[float, ...]":
            values[item.name] = table.numbers(item.name)
        elif is_finite(value := table.table.get(item.name)):
            values[item.name] = value
        else:
            raise table.refuse("a number", item.name, value)
    try:
        schedule: Schedule = kind(**values)
    except DistIRError as wrong:
        raise table.error(wrong.message, table.where) from None
    return schedule
