"""Adadelta: `torch.optim.Adadelta`. Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.ir import Value
from distir_relax.ops import Builder
from distir_relax.optimizers.optimizer import Numbers, Optimizer, add_weight_decay, check_betas
from distir_relax.support.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class Adadelta(Optimizer):
    """The options of `torch.optim.Adadelta`; `weight_decay` is part of the gradient.

    `lr` may be a `Schedule`. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no weight decay.
    Raises `DistIRError` for options that are not numbers or below 0, and for a `rho` that is not below 1.
    """

    lr: LearningRate = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        check_betas((self.rho, 0.0), "Adadelta", "a rho")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the averages of the squares of gradients and of updates."""
        return ("square_avg", "acc_delta")

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        rho, eps = float(self.rho), g.constant(self.eps, parameter.tensor.dtype)
        gradient = add_weight_decay(g, parameter, gradient, float(self.decay_of(parameter)))
        # Before the state is updated in place.
        last = g.emit("sqrt", g.emit("add", state["acc_delta"], eps))
        square = g.emit("moving_square", state["square_avg"], gradient, decay=rho)
        deviation = g.emit("sqrt", g.emit("add", square, eps))
        step = g.emit("multiply", g.emit("divide", last, deviation), gradient)
        steps = g.emit("moving_square", state["acc_delta"], step, decay=rho)
        new = g.emit("sgd_step", parameter, step, numbers["rate"], decay=0.0)
        return {"square_avg": square, "acc_delta": steps, "": new}
