"""What an optimizer is to a program: the state that it keeps of each parameter, and the ops of its step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.support.learning_rate import Schedule

Numbers = Mapping[str, Value]
"""The numbers of a step, by name: values without dims that are the same for all parameters of a dtype."""


class Optimizer(ABC):
    """One step of training: from each parameter, its gradient and its state, their new values.

    Subclasses are frozen dataclasses with torch's options and defaults. `keeps` are the tensors kept of each parameter,
    zeros at first, by torch's names: ``exp_avg`` of ``h.weight`` is the state ``h.weight.exp_avg``. `counts` says
    whether the step depends on how many there were. With `maximize` the loss is made larger: `update` receives the
    negated gradient. `examples/extend/add_optimizer.py` is a complete optimizer.
    """

    lr: float | Schedule
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    @property
    @abstractmethod
    def keeps(self) -> tuple[str, ...]:
        """The state of a parameter, by name."""

    @property
    def counts(self) -> bool:
        """Whether `numbers` is given the number of the step."""
        return False

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Write with `g` the numbers of a step for the parameters of a dtype.

        `rate` is float64, as is `step`, which counts from 1.
        """
        return {"rate": cast(g, rate, dtype)}

    @abstractmethod
    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """Write with `g` the step of one parameter: new values of what it `keeps`, by name, and its own under ``""``.

        A value is either the result of an op that updates the old value in place (``sgd_step``, ``moving_average``),
        or of any other ops: it is then written back.
        """

    def decay_of(self, parameter: Value) -> float:
        """The weight decay of a parameter: none where one of the patterns `no_decay` matches its name."""
        patterns = (self.no_decay,) if isinstance(self.no_decay, str) else self.no_decay
        return 0.0 if any(fnmatchcase(parameter.name, p) for p in patterns) else self.weight_decay

    def check(self, **numbers: float | Schedule) -> None:
        """Raise `DistIRError` for an option that is not a number of at least 0, and for `no_decay` without patterns."""
        where = type(self).__name__
        for name, number in numbers.items():
            if isinstance(number, Schedule) and name == "lr":
                continue
            if not isinstance(number, Real):
                hint = (
                    "a learning rate that changes is a schedule, such as dr.Cosine(0.1, 1000)" if name == "lr" else ""
                )
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


def gradient_of(g: Builder, parameter: Value, gradient: Value, decay: float) -> Any:
    """The gradient of the loss and of a penalty of ``decay / 2`` times the square of the weights."""
    return g.emit("add_scaled", gradient, parameter, alpha=float(decay)) if decay else gradient
