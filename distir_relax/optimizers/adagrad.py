"""Adagrad: `torch.optim.Adagrad`.

Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, 2011.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, add_weight_decay
from distir_relax.support.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class Adagrad(Optimizer):
    """The options of `torch.optim.Adagrad`; `weight_decay` is part of the gradient.

    `lr` may be a `Schedule`. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no weight decay.
    The state `sum` is torch's without `initial_accumulator_value`, which each step adds. Raises `DistIRError` for
    options that are not numbers or below 0.
    """

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        self.check(
            lr=self.lr, lr_decay=self.lr_decay, weight_decay=self.weight_decay, eps=self.eps,
            initial_accumulator_value=self.initial_accumulator_value,
        )  # fmt: skip

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the sum of the gradient's squares."""
        return ("sum",)

    @property
    def counts(self) -> bool:
        """Return whether the rate decays with each step."""
        return bool(self.lr_decay)

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Emit the rate, ``rate / (1 + (step - 1) lr_decay)``."""
        if step is not None:
            one = g.constant(1.0, "float64")
            passed = g.emit("multiply", g.emit("subtract", step, one), g.constant(self.lr_decay, "float64"))
            rate = g.emit("divide", cast(g, rate, "float64"), g.emit("add", one, passed))
        return {"rate": cast(g, rate, dtype)}

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        dtype = parameter.tensor.dtype
        gradient = add_weight_decay(g, parameter, gradient, float(self.decay_of(parameter)))
        total = added = g.emit("add", state["sum"], g.emit("square", gradient))
        if self.initial_accumulator_value:
            total = g.emit("add", added, g.constant(self.initial_accumulator_value, dtype))
        deviation = g.emit("add", g.emit("sqrt", total), g.constant(self.eps, dtype))
        direction = g.emit("divide", gradient, deviation)
        return {"sum": added, "": g.emit("sgd_step", parameter, direction, numbers["rate"], decay=0.0)}
