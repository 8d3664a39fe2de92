"""RMSprop: `torch.optim.RMSprop`.

Tieleman and Hinton, Lecture 6.5, Coursera, 2012; centered as in Graves, Generating Sequences With Recurrent Neural
Networks, 2013.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, add_weight_decay, check_betas, moving_average
from distir_relax.support.learning_rate import LearningRate, Schedule


@dataclass(frozen=True, slots=True)
class RMSprop(Optimizer):
    """The options of `torch.optim.RMSprop`; `weight_decay` is part of the gradient.

    `lr` and `momentum` may be schedules. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no
    weight decay. Raises `DistIRError` for options that are not numbers or below 0, and for an `alpha` that is not
    below 1.
    """

    lr: LearningRate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float | Schedule = 0.0
    centered: bool = False
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay, momentum=self.momentum)
        check_betas((self.alpha, 0.0), "RMSprop", "an alpha")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the average of the gradient's square, the momentum if used, and the average of the gradient."""
        return ("square_avg", *("momentum_buffer",) * bool(self.momentum), *("grad_avg",) * self.centered)

    def numbers(
        self, g: Builder, rate: Value, step: Value | None, dtype: str, momentum: Value | None = None
    ) -> Numbers:
        """Emit the rate, and the momentum if it changes."""
        scalars = {"rate": rate} if momentum is None else {"rate": rate, "momentum": momentum}
        return {name: cast(g, number, dtype) for name, number in scalars.items()}

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        alpha = float(self.alpha)
        gradient = add_weight_decay(g, parameter, gradient, float(self.decay_of(parameter)))
        variance = square = g.emit("moving_square", state["square_avg"], gradient, decay=alpha)
        new_state = {"square_avg": square}
        if self.centered:
            average = g.emit("moving_average", state["grad_avg"], gradient, decay=alpha, weight=1 - alpha)
            new_state["grad_avg"] = average
            variance = g.emit("subtract", square, g.emit("square", average))
        deviation = g.emit("add", g.emit("sqrt", variance), g.constant(self.eps, parameter.tensor.dtype))
        direction = g.emit("divide", gradient, deviation)
        if self.momentum:
            factor = numbers["momentum"] if isinstance(self.momentum, Schedule) else float(self.momentum)
            direction = moving_average(g, state["momentum_buffer"], direction, factor)
            new_state["momentum_buffer"] = direction
        return {**new_state, "": g.emit("sgd_step", parameter, direction, numbers["rate"], decay=0.0)}
