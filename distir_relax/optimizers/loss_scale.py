"""Dynamic loss scaling for gradients in float16: `torch.amp.GradScaler`.

Micikevicius et al., Mixed Precision Training, 2017. The gradients are those of the loss times a scale, so that small
ones do not vanish; they are divided by it before the optimizer's step. A step with a gradient that is infinite or NaN
is skipped, and the scale reduced; after some steps in a row without one it grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from distir_relax.errors import DistIRError
from distir_relax.ir import TensorType, Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.conditional_update import ConditionalUpdate

LOSS_SCALE = "loss_scale"
"""The state with the scale, a float32 scalar."""
GOOD_STEPS = "loss_scale.good_steps"
"""The state that counts steps with finite gradients since the scale has changed, an int64 scalar."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The options and defaults of `torch.amp.GradScaler`.

    The scale begins with `init`. It is multiplied by `growth` after `interval` steps in a row whose gradients are all
    finite, and by `backoff` after a step that is skipped. Raises `DistIRError` for numbers out of range.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        numbers = {"init": self.init, "growth": self.growth, "backoff": self.backoff}
        for name, number in numbers.items():
            if not isinstance(number, Real) or not 0 < float(number) < math.inf:
                raise DistIRError(f"expected {name} of more than 0, found {number!r}", "LossScale")
        if self.growth < 1 or self.backoff >= 1:
            raise DistIRError(
                f"expected growth of at least 1 and backoff below 1, found {self.growth} and {self.backoff}",
                "LossScale",
            )
        if not isinstance(self.interval, int) or self.interval < 1:
            raise DistIRError(f"expected an interval of at least 1 step, found {self.interval!r}", "LossScale")


class ScaledStep:
    """The part of a training step that depends on the loss scale, emitted with `g`.

    `gradients` are those of the scaled loss, by parameter. `unscaled` are those of the loss, and `is_finite` is whether
    all of them are, a scalar: one of the program, so that all ranks decide alike. `writing` depends on it.
    """

    def __init__(self, g: Builder, gradients: Mapping[str, Value], options: LossScale) -> None:
        self._g, self._options = g, options
        self._scale = next(i.value for i in g.inputs if i.value.name == LOSS_SCALE)
        count: Value | None = None
        for gradient in gradients.values():
            wrong = cast(g, g.emit("logical_not", g.emit("isfinite", gradient)), "float32")
            term = g.aten("sum.default", wrong)
            count = term if count is None else g.emit("add", count, term)
        assert count is not None, "there are gradients"
        self.is_finite: Value = g.emit("equal", count, g.constant(0.0, "float32"))
        self.writing = ConditionalUpdate(g, self.is_finite)
        inverse = g.emit("divide", g.constant(1.0, "float64"), cast(g, self._scale, "float64"))
        inverses = {dtype: cast(g, inverse, dtype) for dtype in {v.tensor.dtype for v in gradients.values()}}
        self.unscaled = {name: g.emit("multiply", v, inverses[v.tensor.dtype]) for name, v in gradients.items()}

    def next_scale(self) -> list[tuple[str, Value]]:
        """Emit the new scale and count; return the states with their new values."""
        g, options, scale = self._g, self._options, self._scale
        count = g.input(GOOD_STEPS, TensorType((), "int64"), "state")
        zero, following = g.constant(0, "int64"), g.emit("add", count, g.constant(1, "int64"))
        is_due = g.emit("equal", following, g.constant(options.interval, "int64"))
        wide = cast(g, scale, "float64")
        grown = cast(g, g.emit("multiply", wide, g.constant(float(options.growth), "float64")), "float32")
        reduced = cast(g, g.emit("multiply", wide, g.constant(float(options.backoff), "float64")), "float32")
        # As in torch, a scale that would be infinite stays.
        grown = g.emit("where", g.emit("isfinite", grown), grown, scale)
        kept = g.emit("where", is_due, grown, scale)
        new = {
            LOSS_SCALE: (scale, g.emit("where", self.is_finite, kept, reduced)),
            GOOD_STEPS: (
                count, g.emit("where", self.is_finite, g.emit("where", is_due, zero, following), zero),
            ),
        }  # fmt: skip
        return [(name, g.emit("assign", *pair)) for name, pair in new.items()]
