"""Variants of Adam: `torch.optim.NAdam` and `torch.optim.RAdam`.

Dozat, Incorporating Nesterov Momentum into Adam, 2016; Liu et al., On the Variance of the Adaptive Learning Rate and
Beyond, 2019.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.ir import TensorType, Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, add_weight_decay, check_betas
from distir_relax.support.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class _AdamVariant(Optimizer):
    """Averages of gradients and of their squares; `direction` is a step along them, times the rate."""

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False
    own_steps: bool = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        check_betas(self.betas, type(self).__name__)

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the averages of the gradient and of its square."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def counts(self) -> bool:
        """Return True: bias correction needs the step number."""
        return True

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        decay = float(self.decay_of(parameter))
        if not self.decoupled_weight_decay:
            gradient = add_weight_decay(g, parameter, gradient, decay)
        beta1, beta2 = map(float, self.betas)
        average = g.emit("moving_average", state["exp_avg"], gradient, decay=beta1, weight=1 - beta1)
        square = g.emit("moving_square", state["exp_avg_sq"], gradient, decay=beta2)
        deviation = g.emit("add", g.emit("sqrt", square), numbers["floor"])
        direction, more = self.direction(g, gradient, average, deviation, state, numbers)
        new = parameter
        if decay and self.decoupled_weight_decay:
            shrunk = g.emit("multiply", numbers["rate"], g.constant(decay, parameter.tensor.dtype))
            new = g.emit("subtract", new, g.emit("multiply", new, shrunk))
        return {"exp_avg": average, "exp_avg_sq": square, **more, "": g.emit("subtract", new, direction)}

    @abstractmethod
    def direction(
        self, g: Builder, gradient: Value, average: Value, deviation: Value, state: Mapping[str, Value],
        numbers: Numbers,
    ) -> tuple[Value, dict[str, Value]]:  # fmt: skip
        """Emit a step, and more of the state. `deviation` is ``sqrt(v) + floor``, to be divided by with ``root``."""

    def corrections(self, g: Builder, step: Value) -> tuple[Value, Value]:
        """Emit ``1 - beta1^t`` and ``sqrt(1 - beta2^t)`` in float64."""
        one = g.constant(1.0, "float64")
        powers = (g.emit("power", g.constant(beta, "float64"), step) for beta in self.betas)
        first, second = (g.emit("subtract", one, power) for power in powers)
        return first, g.emit("sqrt", second)


@dataclass(frozen=True, slots=True)
class RAdam(_AdamVariant):
    """The options of `torch.optim.RAdam`.

    `lr` may be a `Schedule`. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no weight decay.
    Raises `DistIRError` for options that are not numbers or below 0, and for betas that are not below 1.
    """

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Emit the rate, the size of a step of the average alone, of a rectified one, and the floor of its divisor."""
        assert step is not None, "RAdam needs the step number"

        def number(x: float) -> Value:
            return g.constant(x, "float64")

        beta = float(self.betas[1])
        longest = 2 / (1 - beta) - 1
        first, root = self.corrections(g, step)
        size = g.emit("divide", cast(g, rate, "float64"), first)
        power = g.emit("power", number(beta), step)
        lost = g.emit("multiply", g.emit("multiply", number(2.0), step), power)
        length = g.emit("subtract", number(longest), g.emit("divide", lost, g.emit("square", root)))
        is_long = g.emit("greater", length, number(5.0))
        # Below 5 another length stands in, so that no root is of a negative number.
        length = g.emit("where", is_long, length, number(longest))
        terms = g.emit("multiply", *(g.emit("subtract", length, number(n)) for n in (4.0, 2.0)))
        ratio = g.emit("divide", terms, g.emit("multiply", length, number((longest - 4) * (longest - 2) / longest)))
        rectified = g.emit("multiply", g.emit("multiply", size, g.emit("sqrt", ratio)), root)
        zero = number(0.0)
        scalars = {
            "rate": rate, "floor": number(self.eps), "plain": g.emit("where", is_long, zero, size),
            "rectified": g.emit("where", is_long, rectified, zero),
        }  # fmt: skip
        return {name: cast(g, value, dtype) for name, value in scalars.items()}

    def direction(
        self, g: Builder, gradient: Value, average: Value, deviation: Value, state: Mapping[str, Value],
        numbers: Numbers,
    ) -> tuple[Value, dict[str, Value]]:  # fmt: skip
        """See `_AdamVariant`."""
        size = g.emit("add", g.emit("divide", numbers["rectified"], deviation), numbers["plain"])
        return g.emit("multiply", average, size), {}


@dataclass(frozen=True, slots=True)
class NAdam(_AdamVariant):
    """The options of `torch.optim.NAdam`; `mu_product` is part of the state of each parameter.

    `lr` may be a `Schedule`. Parameters that match one of the patterns `no_decay` (``"*.bias"``) have no weight decay.
    Raises `DistIRError` for options that are not numbers or below 0, and for betas that are not below 1.
    """

    lr: LearningRate = 2e-3
    momentum_decay: float = 4e-3

    def states(self, parameter: TensorType) -> dict[str, TensorType]:
        """Return the types of both averages, and of the product of all momenta so far, a scalar."""
        return {**super(NAdam, self).states(parameter), "mu_product": TensorType((), parameter.dtype)}

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Emit the rate, the momenta of this step and the next, and the floor of the divisor with its root."""
        assert step is not None, "NAdam needs the step number"
        _, root = self.corrections(g, step)
        one = g.constant(1.0, "float64")

        def momentum(number: Value) -> Value:
            exponent = g.emit("multiply", number, g.constant(self.momentum_decay * math.log(0.96), "float64"))
            half = g.emit("multiply", g.emit("exp", exponent), g.constant(0.5 * float(self.betas[0]), "float64"))
            return g.emit("subtract", g.constant(float(self.betas[0]), "float64"), half)  # type: ignore[no-any-return]

        scalars = {
            "rate": rate, "root": root, "floor": g.emit("multiply", g.constant(self.eps, "float64"), root),
            "momentum": momentum(step), "next": momentum(g.emit("add", step, one)),
            "first": cast(g, g.emit("equal", step, one), "float64"),
        }  # fmt: skip
        return {name: cast(g, value, dtype) for name, value in scalars.items()}

    def direction(
        self, g: Builder, gradient: Value, average: Value, deviation: Value, state: Mapping[str, Value],
        numbers: Numbers,
    ) -> tuple[Value, dict[str, Value]]:  # fmt: skip
        """See `_AdamVariant`."""
        one = g.constant(1.0, gradient.tensor.dtype)
        # State begins with zeros, and the product with one.
        product = g.emit("multiply", g.emit("add", state["mu_product"], numbers["first"]), numbers["momentum"])
        following = g.emit("multiply", product, numbers["next"])
        scale = g.emit("multiply", numbers["rate"], numbers["root"])
        shares = []
        for part, until in ((g.emit("subtract", one, numbers["momentum"]), product), (numbers["next"], following)):
            shares.append(g.emit("multiply", scale, g.emit("divide", part, g.emit("subtract", one, until))))
        terms = (g.emit("multiply", *pair) for pair in zip((gradient, average), shares, strict=True))
        return g.emit("divide", g.emit("add", *terms), deviation), {"mu_product": product}
