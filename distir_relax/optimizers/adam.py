"""Adam, with weight decay in the gradient or beside it: `torch.optim.Adam` and `torch.optim.AdamW`.

Kingma and Ba, Adam: A Method for Stochastic Optimization, 2014; Loshchilov and Hutter, Decoupled Weight Decay
Regularization, 2017. With averages m and v, and corrections a = 1 - beta1^t and b = 1 - beta2^t,

    rate / a * m / (sqrt(v) / sqrt(b) + eps)  =  rate * sqrt(b) / a * m / (sqrt(v) + eps * sqrt(b))

of which the right side needs fewer passes over memory: what does not depend on the element is a number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, gradient_of
from distir_relax.support.learning_rate import Schedule


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """The options of `torch.optim.Adam`; `weight_decay` is part of the gradient.

    `lr` may be a `Schedule`. Of parameters that one of the patterns `no_decay` matches (``"*.bias"``) nothing decays.
    With `amsgrad` steps are divided by the largest average of squares so far (Reddi, Kale and Kumar, On the Convergence
    of Adam and Beyond, 2018). Raises `DistIRError` for options that are no numbers or below 0, and for betas that are
    not below 1.
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()
    amsgrad: bool = False
    maximize: bool = False

    decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        if not pair or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in self.betas):
            raise DistIRError(f"expected two betas from 0 to below 1, found {self.betas!r}", type(self).__name__)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The averages of the gradient and of its square, and with `amsgrad` the maximum of the latter."""
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def counts(self) -> bool:
        """The averages of the first steps are corrected for having begun at zero."""
        return True

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """The rate, the size of a step along ``m / (sqrt(v) + floor)``, and the floor, computed in float64."""
        assert step is not None, "Adam counts steps"
        one, eps = g.constant(1.0, "float64"), g.constant(self.eps, "float64")
        first, second = (
            g.emit("subtract", one, g.emit("power", g.constant(beta, "float64"), step)) for beta in self.betas
        )
        root = g.emit("sqrt", second)
        size = g.emit("divide", g.emit("multiply", cast(g, rate, "float64"), root), first)
        found = {"rate": rate, "size": size, "floor": g.emit("multiply", eps, root)}
        return {name: cast(g, number, dtype) for name, number in found.items()}

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        decay = float(self.decay_of(parameter))
        if not self.decoupled:
            gradient = gradient_of(g, parameter, gradient, decay)
        keep, keep_square = map(float, self.betas)
        average = g.emit("moving_average", state["exp_avg"], gradient, decay=keep, weight=1 - keep)
        square = g.emit("moving_square", state["exp_avg_sq"], gradient, decay=keep_square)
        found = {"exp_avg": average, "exp_avg_sq": square}
        if self.amsgrad:
            square = found["max_exp_avg_sq"] = g.emit("maximum", state["max_exp_avg_sq"], square)
        operands = (parameter, average, square, numbers["rate"], numbers["size"], numbers["floor"])
        return {**found, "": g.emit("adam_step", *operands, decay=decay if self.decoupled else 0.0)}


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """The options of `torch.optim.AdamW`; `weight_decay` shrinks the weights beside the gradient's step.

    Raises as `Adam` does.
    """

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True
