"""Optimizer interface: the state of each parameter, and the ops of a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from distir_relax.bundle import OWN_STEP
from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType, Value
from distir_relax.ops import Builder, cast
from distir_relax.support.learning_rate import MOMENTUM, RATE, LearningRate, Schedule, as_schedule

Numbers = Mapping[str, Value]
"""The scalars of a step, by name: the same for all parameters of a dtype."""


class Optimizer(ABC):
    """One training step: compute the new values of each parameter and its state from its gradient.

    Subclasses are frozen dataclasses with torch's options and defaults. `keeps` are the state tensors of each
    parameter, initially zero, by torch's names: ``exp_avg`` of ``h.weight`` is the state ``h.weight.exp_avg``; `states`
    gives their types. `counts` is whether the step depends on its number: of the run, or with `own_steps` of the
    parameter's own updates, a state of it, as in torch. With `maximize` the loss is maximized: `update` receives the
    negated gradient. `examples/extend/add_optimizer.py` is a complete optimizer.
    """

    lr: LearningRate
    weight_decay: float = 0.0
    momentum: float | Schedule = 0.0
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False
    own_steps: bool = False

    @property
    @abstractmethod
    def keeps(self) -> tuple[str, ...]:
        """Return the names of a parameter's state tensors."""

    def states(self, parameter: TensorType) -> dict[str, TensorType]:
        """Return the types of a parameter's state tensors by name: those that it `keeps` are like itself."""
        return {**dict.fromkeys(self.keeps, parameter), **self.own_count}

    @property
    def own_count(self) -> dict[str, TensorType]:
        """Return the type of the number of a parameter's own updates, if it counts them (`own_steps`)."""
        return {OWN_STEP: TensorType((), "int64")} if self.own_steps else {}

    @property
    def parts(self) -> Sequence[Optimizer]:
        """Return the optimizers of which this one consists: itself, but for `Groups`."""
        return (self,)

    def of(self, name: str) -> Optimizer:
        """Return the part that updates the parameter called `name`."""
        return self

    @property
    def updates(self) -> tuple[Update, ...]:
        """Return the updates of a step, in order: one of all parameters, but for `Updates`."""
        return (Update("", "*", self),)

    def unused(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the patterns of groups that match none of these parameters."""
        return ()

    @property
    def momentum_schedule(self) -> Schedule | None:
        """Return the schedule of the momentum, whose value `numbers` then takes as `momentum`; None if it has none."""
        return self.momentum if isinstance(self.momentum, Schedule) else None

    @property
    def counts(self) -> bool:
        """Return whether `numbers` needs the number of the step."""
        return False

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Emit with `g` the scalars of a step for the parameters of a dtype.

        `rate` is float64, as is `step`, which counts from 1. With a `momentum_schedule` there is `momentum`, too.
        """
        return {"rate": cast(g, rate, dtype)}

    @abstractmethod
    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """Emit with `g` the step of one parameter; return its new state by name, and its new value under ``""``.

        A value is either the result of an op that updates the old value in place (``sgd_step``, ``moving_average``), or
        of any other ops: it is then written back.
        """

    @property
    def no_decay_patterns(self) -> tuple[str, ...]:
        """Return the patterns `no_decay`."""
        return (self.no_decay,) if isinstance(self.no_decay, str) else tuple(self.no_decay)

    def decay_of(self, parameter: Value) -> float:
        """Return the weight decay of a parameter: 0 if its name matches one of the patterns `no_decay`."""
        return 0.0 if any(fnmatchcase(parameter.name, p) for p in self.no_decay_patterns) else self.weight_decay

    def check(self, **numbers: LearningRate) -> None:
        """Raise `DistIRError` for an option that is not a number of at least 0, and for `no_decay` without patterns.

        The learning rate may also be a schedule, or a function of the step.
        """
        where = type(self).__name__
        for name, number in numbers.items():
            if isinstance(number, Schedule) and name in ("lr", "momentum"):
                continue
            if name == "lr" and callable(number) and not isinstance(number, type):
                as_schedule(number)
                continue
            if not isinstance(number, Real):
                hint = (
                    "a learning rate that changes is a schedule, such as dr.lr.Cosine(0.1, 1000)"
                    if name == "lr"
                    else ""
                )
                if name == "momentum" and callable(number):
                    hint = "a function of the step is recorded: dr.lr.Tabulated.of(function, steps=1000)"
                raise DistIRError(f"expected {name} to be a number, found {number!r}", where, hint)
            if not 0 <= float(number) < math.inf:
                raise DistIRError(f"expected {name} of at least 0, found {number}", where)
        patterns = self.no_decay
        if not isinstance(patterns, (str, tuple, list)) or not all(isinstance(p, str) for p in patterns):
            raise DistIRError(
                f"expected no_decay to be patterns of parameter names, found {patterns!r}",
                where,
                'for example no_decay=("*.bias", "norm*")',
            )


@dataclass(frozen=True)
class Update:
    """An update of some parameters by the gradients of a loss: one of several in a step, as of the networks of a GAN.

    The model, or its loss function, returns the `loss` under this name. `parameters` are patterns of their names. The
    update is made in the first step and in each `every`-th after it; a schedule of its learning rate counts all steps.

    Raises `DistIRError` for no patterns, something that is no optimizer, and a number below 1.
    """

    loss: str
    parameters: str | tuple[str, ...]
    optimizer: Optimizer
    every: int = 1

    def __post_init__(self) -> None:
        where = f"the update of {self.loss!r}"
        if not self.patterns or not all(isinstance(pattern, str) and pattern for pattern in self.patterns):
            raise DistIRError(f"expected patterns of parameter names, found {self.parameters!r}", where)
        if not isinstance(self.optimizer, Optimizer):
            raise DistIRError(
                f"expected an optimizer such as dr.optim.Adam(lr=2e-4), found {type(self.optimizer).__name__}", where
            )
        if not isinstance(self.every, int) or self.every < 1:
            raise DistIRError(f"expected every to be 1 or more steps, found {self.every!r}", where)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of names."""
        return (self.parameters,) if isinstance(self.parameters, str) else tuple(self.parameters)

    def of(self, name: str) -> bool:
        """Return whether the parameter of a name is updated."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def check_betas(betas: Any, where: str, what: str = "two betas", may_change: bool = False) -> None:
    """Raise `DistIRError` unless `betas` are two numbers from 0 to below 1; the first may be a schedule if it may."""
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    numbers = betas[1:] if is_pair and may_change and isinstance(betas[0], Schedule) else betas
    if not is_pair or not all(isinstance(beta, Real) and 0 <= float(beta) < 1 for beta in numbers):
        found = betas if what == "two betas" else betas[0]
        raise DistIRError(f"expected {what} from 0 to below 1, found {found!r}", where)


def kinds_of(optimizer: Optimizer) -> str:
    """Return the names of the kinds of all parts, each once, in alphabetical order and separated by commas."""
    kinds = {(type(part), getattr(part, "kind", None)) for part in optimizer.parts}
    return ", ".join(sorted({(of if isinstance(of, type) else kind).__name__ for kind, of in kinds}))


def rates_of(optimizer: Optimizer) -> dict[str, Schedule]:
    """Return the inputs for learning rates and momenta, by name: one for each schedule of the optimizer's parts."""
    named: dict[str, Schedule] = {}
    for kind, several in (
        (RATE, [as_schedule(part.lr) for part in optimizer.parts]),
        (MOMENTUM, [part.momentum_schedule for part in optimizer.parts]),
    ):
        schedules: list[Schedule] = []
        for schedule in several:
            if schedule is not None and schedule not in schedules:
                schedules.append(schedule)
        named |= {f"{kind}.{number}" if number else kind: schedule for number, schedule in enumerate(schedules)}
    return named


def moving_average(g: Builder, old: Value, new: Value, decay: float | Value, weight: float | Value = 1.0) -> Value:
    """Emit ``decay * old + weight * new``: one op in place, unless `decay` is a scalar that changes.

    `weight` is then another, or 1.
    """
    if isinstance(decay, Value):
        added = g.emit("multiply", new, weight) if isinstance(weight, Value) else new
        return g.emit("add", g.emit("multiply", old, decay), added)  # type: ignore[no-any-return]
    return g.emit("moving_average", old, new, decay=decay, weight=float(weight))  # type: ignore[no-any-return,arg-type]


def add_weight_decay(g: Builder, parameter: Value, gradient: Value, decay: float) -> Any:
    """Add the gradient of the penalty ``decay / 2`` times the squared norm of the weights."""
    return g.emit("add_scaled", gradient, parameter, alpha=float(decay)) if decay else gradient
