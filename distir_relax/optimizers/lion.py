"""Lion: steps by the sign of an average of gradients.

Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.ir import Value
from distir_relax.ops import Builder
from distir_relax.optimizers.optimizer import Numbers, Optimizer, check_betas
from distir_relax.support.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class Lion(Optimizer):
    """Options as in the paper; `weight_decay` is decoupled from the gradient.

    `lr` may be a `Schedule`. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no weight decay.
    Raises `DistIRError` for options that are not numbers or below 0, and for betas that are not below 1.
    """

    lr: LearningRate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, weight_decay=self.weight_decay)
        check_betas(self.betas, "Lion")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the average of the gradient."""
        return ("exp_avg",)

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        first, second = map(float, self.betas)
        kept = g.emit("multiply", state["exp_avg"], g.constant(first, parameter.tensor.dtype))
        direction = g.emit("sign", g.emit("add_scaled", kept, gradient, alpha=1 - first))
        new = g.emit("sgd_step", parameter, direction, numbers["rate"], decay=float(self.decay_of(parameter)))
        average = g.emit("moving_average", state["exp_avg"], gradient, decay=second, weight=1 - second)
        return {"exp_avg": average, "": new}
