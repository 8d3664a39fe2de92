"""Adam with L2 penalty, and with decoupled weight decay: `torch.optim.Adam` and `torch.optim.AdamW`.

Kingma and Ba, Adam: A Method for Stochastic Optimization, 2014; Loshchilov and Hutter, Decoupled Weight Decay
Regularization, 2017. With averages m and v, and corrections a = 1 - beta1^t and b = 1 - beta2^t,

    rate / a * m / (sqrt(v) / sqrt(b) + eps)  =  rate * sqrt(b) / a * m / (sqrt(v) + eps * sqrt(b))

where the right side needs fewer passes over memory: all factors that do not depend on the element are scalars of the
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, add_weight_decay, check_betas, moving_average
from distir_relax.support.learning_rate import LearningRate, Schedule


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """The options of `torch.optim.Adam`; `weight_decay` is part of the gradient.

    `lr` and the first of the `betas` may be schedules. Parameters that match one of the patterns `no_decay`
    (``"*.bias"``) have no weight decay. With `own_steps` each parameter counts its own updates: one that is unfrozen in
    a resumed run begins with new averages, and the others keep theirs. With `amsgrad` steps are divided by the largest
    average of squares so far (Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018). Raises `DistIRError`
    for options that are not numbers or below 0, and for betas that are not below 1.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float | Schedule, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()
    amsgrad: bool = False
    maximize: bool = False
    own_steps: bool = False

    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        check_betas(self.betas, type(self).__name__, may_change=True)

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the averages of the gradient and of its square, and with `amsgrad` the maximum of the latter."""
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def momentum_schedule(self) -> Schedule | None:
        """Return the schedule of the first beta, if it has one."""
        return self.betas[0] if isinstance(self.betas[0], Schedule) else None

    @property
    def counts(self) -> bool:
        """Return True: bias correction needs the step number."""
        return True

    def numbers(
        self, g: Builder, rate: Value, step: Value | None, dtype: str, momentum: Value | None = None
    ) -> Numbers:
        """Emit the rate, the step size along ``m / (sqrt(v) + floor)``, and the floor, computed in float64."""
        assert step is not None, "Adam needs the step number"
        one, eps = g.constant(1.0, "float64"), g.constant(self.eps, "float64")
        if not isinstance(self.betas[0], Schedule):
            momentum = g.constant(self.betas[0], "float64")
        assert momentum is not None, "betas with a schedule need the momentum"
        betas = (momentum, g.constant(self.betas[1], "float64"))
        first, second = (g.emit("subtract", one, g.emit("power", beta, step)) for beta in betas)
        root = g.emit("sqrt", second)
        size = g.emit("divide", g.emit("multiply", cast(g, rate, "float64"), root), first)
        scalars = {"rate": rate, "size": size, "floor": g.emit("multiply", eps, root)}
        if self.momentum_schedule is not None:
            scalars |= {"beta": momentum, "share": g.emit("subtract", one, momentum)}
        return {name: cast(g, number, dtype) for name, number in scalars.items()}

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        decay = float(self.decay_of(parameter))
        if not self.decoupled:
            gradient = add_weight_decay(g, parameter, gradient, decay)
        first, beta2 = self.betas[0], float(self.betas[1])
        factors = (
            (numbers["beta"], numbers["share"]) if isinstance(first, Schedule) else (float(first), 1 - float(first))
        )
        average = moving_average(g, state["exp_avg"], gradient, *factors)
        square = g.emit("moving_square", state["exp_avg_sq"], gradient, decay=beta2)
        new_state = {"exp_avg": average, "exp_avg_sq": square}
        if self.amsgrad:
            square = new_state["max_exp_avg_sq"] = g.emit("maximum", state["max_exp_avg_sq"], square)
        operands = (parameter, average, square, numbers["rate"], numbers["size"], numbers["floor"])
        return {**new_state, "": g.emit("adam_step", *operands, decay=decay if self.decoupled else 0.0)}


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """The options of `torch.optim.AdamW`; `weight_decay` is decoupled from the gradient.

    Raises as `Adam` does.
    """

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True
