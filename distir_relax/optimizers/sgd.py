"""Stochastic gradient descent, with momentum: `torch.optim.SGD`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from distir_relax.errors import DistIRError
from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, add_weight_decay, moving_average
from distir_relax.support.learning_rate import LearningRate, Schedule


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """The options of `torch.optim.SGD`; `weight_decay` is part of the gradient.

    `lr` and `momentum` may be schedules. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no
    weight decay. Raises `DistIRError` for options that are not numbers or below 0, and for Nesterov momentum without
    momentum or with dampening.
    """

    lr: LearningRate = 1e-3
    momentum: float | Schedule = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        # Torch accepts a negative dampening as well.
        if not isinstance(self.dampening, Real):
            raise DistIRError(f"expected dampening to be a number, found {self.dampening!r}", "SGD")
        if self.nesterov and (not self.momentum or self.dampening):
            raise DistIRError("Nesterov momentum needs a momentum, and no dampening", "SGD")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the momentum, if used."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def counts(self) -> bool:
        """Return whether the first step differs: torch does not dampen the first gradient."""
        return bool(self.momentum and self.dampening)

    def numbers(
        self, g: Builder, rate: Value, step: Value | None, dtype: str, momentum: Value | None = None
    ) -> Numbers:
        """Emit the rate, the momentum if it changes, and the factor of a gradient in a dampened momentum."""
        scalars = {"rate": cast(g, rate, dtype)}
        if momentum is not None:
            scalars["momentum"] = cast(g, momentum, dtype)
        if step is not None:
            first = g.emit("less_equal", step, g.constant(1.0, "float64"))
            damped = g.emit("where", first, g.constant(1.0, "float64"), g.constant(1 - self.dampening, "float64"))
            scalars["damped"] = cast(g, damped, dtype)
        return scalars

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        decay = float(self.decay_of(parameter))
        if not self.momentum:
            return {"": g.emit("sgd_step", parameter, gradient, numbers["rate"], decay=decay)}
        gradient = add_weight_decay(g, parameter, gradient, decay)
        added = g.emit("multiply", gradient, numbers["damped"]) if "damped" in numbers else gradient
        factor = float(self.momentum) if not isinstance(self.momentum, Schedule) else numbers["momentum"]
        direction = momentum = moving_average(g, state["momentum_buffer"], added, factor)
        if self.nesterov:
            direction = (
                g.emit("add", gradient, g.emit("multiply", momentum, factor))
                if isinstance(factor, Value)
                else g.emit("add_scaled", gradient, momentum, alpha=factor)
            )
        new = g.emit("sgd_step", parameter, direction, numbers["rate"], decay=0.0)
        return {"momentum_buffer": momentum, "": new}
