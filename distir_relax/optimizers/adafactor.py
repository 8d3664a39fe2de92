"""Adafactor: `torch.optim.Adafactor`.

Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018. Of the squares of a matrix's
gradient it keeps averages of rows and of columns alone, whose product is the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType, Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer
from distir_relax.support.learning_rate import LearningRate

_LEAST_SCALE = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The least variance, which torch takes from the parameter's dtype."""


@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """The options of `torch.optim.Adafactor`; `weight_decay` is decoupled from the gradient.

    Steps are relative to the root mean square of a parameter, or to ``eps[1]`` if that is larger; ``eps[0]``, by
    default that of the dtype, is the least variance. Updates with a root mean square above `d` are scaled down. Without
    `scale_parameter` steps are absolute; without `relative_step` the rate is not bounded by the inverse square root of
    the step; and `added_eps` is added to squared gradients: these are options of transformers' Adafactor. With
    `own_steps` each parameter counts its own updates. `lr` may be a `Schedule`. Parameters that match one of the
    patterns `no_decay` (``"*.bias"``) have no weight decay. Raises `DistIRError` for options that are not numbers, for
    a `beta2_decay` above 0, and for others below 0.
    """

    lr: LearningRate = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False
    scale_parameter: bool = True
    relative_step: bool = True
    added_eps: float = 0.0
    own_steps: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.eps, (tuple, list)) or len(self.eps) != 2:
            raise DistIRError(f"expected two values of eps, found {self.eps!r}", "Adafactor")
        first, second = self.eps
        self.check(lr=self.lr, weight_decay=self.weight_decay, eps=second, added_eps=self.added_eps)
        if first is not None:
            self.check(eps=first)
        if not isinstance(self.d, Real) or not 1 <= float(self.d) < math.inf:
            raise DistIRError(f"expected d of at least 1, found {self.d!r}", "Adafactor")
        if not isinstance(self.beta2_decay, Real) or not -math.inf < float(self.beta2_decay) <= 0:
            raise DistIRError(f"expected beta2_decay of at most 0, found {self.beta2_decay!r}", "Adafactor")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return nothing: no state has the shape of its parameter, unless that is a vector."""
        return ()

    def states(self, parameter: TensorType) -> dict[str, TensorType]:
        """Return the averages by rows and by columns, or of a vector's elements."""
        shape, dtype = parameter.shape, parameter.dtype
        if len(shape) < 2:
            return {"variance": parameter, **self.own_count}
        return {
            "row_var": TensorType((*shape[:-1], 1), dtype), "col_var": TensorType((*shape[:-2], 1, shape[-1]), dtype),
            **self.own_count,
        }  # fmt: skip

    @property
    def counts(self) -> bool:
        """Return True: averages weigh early steps less."""
        return True

    def numbers(self, g: Builder, rate: Value, step: Value | None, dtype: str) -> Numbers:
        """Emit the rate, the relative step, and the weight of a gradient in the averages, computed in float64."""
        assert step is not None, "Adafactor needs the step number"
        rate = cast(g, rate, "float64")
        relative = g.emit("minimum", rate, g.emit("rsqrt", step)) if self.relative_step else rate
        weight = g.emit("power", step, g.constant(float(self.beta2_decay), "float64"))
        scalars = {"rate": rate, "relative": relative, "weight": weight}
        return {name: cast(g, number, dtype) for name, number in scalars.items()}

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        kind = parameter.tensor
        rank, dtype = len(kind.shape), kind.dtype
        least = _LEAST_SCALE[dtype] if self.eps[0] is None else self.eps[0]

        def mean(x: Value, axes: tuple[int, ...], size: float) -> Value:
            total = g.emit("sum", x, axis=axes, keepdims=True) if axes else x
            result: Value = g.emit("multiply", total, g.constant(1 / size, dtype))
            return result

        def average(name: str, x: Value) -> Value:
            kept = state[name]
            result: Value = g.emit("add", kept, g.emit("multiply", g.emit("subtract", x, kept), numbers["weight"]))
            return result

        def length(x: Value) -> Value:
            """Return the root mean square."""
            square = mean(g.emit("square", x), tuple(range(rank)), kind.elements)
            result: Value = g.emit("sqrt", square)
            return result

        square = g.emit("square", gradient)
        if self.added_eps:
            square = g.emit("add", square, g.constant(self.added_eps, dtype))
        if rank < 2:
            new_state = {"variance": average("variance", square)}
            variance = new_state["variance"]
        else:
            rows, columns = kind.shape[-2:]
            by_row = average("row_var", mean(square, (rank - 1,), columns))
            by_column = average("col_var", mean(square, (rank - 2,), rows))
            new_state = {"row_var": by_row, "col_var": by_column}
            scale = g.emit("maximum", mean(by_row, (rank - 2,), rows), g.constant(least, dtype))
            variance = g.emit("divide", g.emit("multiply", by_row, by_column), scale)
        variance = g.emit("maximum", variance, g.constant(least * least, dtype))
        direction = g.emit("multiply", gradient, g.emit("rsqrt", variance))
        size = g.emit("multiply", length(direction), g.constant(1 / self.d, dtype))
        size = g.emit("maximum", size, g.constant(1.0, dtype))
        step = numbers["relative"]
        if self.scale_parameter:
            step = g.emit("multiply", g.emit("maximum", length(parameter), g.constant(self.eps[1], dtype)), step)
        moved = g.emit("multiply", direction, g.emit("divide", step, size))
        kept = parameter
        if decay := float(self.decay_of(parameter)):
            shrink = g.emit("multiply", numbers["rate"], g.constant(decay, dtype))
            kept = g.emit("subtract", parameter, g.emit("multiply", parameter, shrink))
        return {**new_state, "": g.emit("subtract", kept, moved)}
