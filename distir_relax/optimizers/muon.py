"""Muon: momentum whose matrices are made nearly orthogonal: `torch.optim.Muon`.

Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; `adjust_lr_fn` "match_rms_adamw" as in Liu
et al., Muon is Scalable for LLM Training, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from distir_relax.errors import DistIRError
from distir_relax.ir import Value
from distir_relax.ops import Builder, cast
from distir_relax.optimizers.optimizer import Numbers, Optimizer, check_betas
from distir_relax.support.learning_rate import LearningRate

_ADJUSTED = ("original", "match_rms_adamw", "none")


@dataclass(frozen=True, slots=True)
class Muon(Optimizer):
    """The options of `torch.optim.Muon`, for matrices alone; `Groups` gives other parameters another optimizer.

    `adjust_lr_fn` is torch's: the rate by the shape of a matrix, "original" by default, or "none" of it.
    The iteration of Newton and Schulz computes in `ns_dtype`, by default that of the parameter; torch's is bfloat16.
    `lr` may be a `Schedule`. Parameters that match one of the patterns `no_decay` have no weight decay, which is
    decoupled. Raises `DistIRError` for options that are not numbers or below 0, and for a parameter that is no matrix.
    """

    lr: LearningRate = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    ns_dtype: str | None = None
    adjust_lr_fn: str | None = None
    no_decay: str | tuple[str, ...] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        self.check(lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        check_betas((self.momentum, 0.0), "Muon", "a momentum")
        numbers = self.ns_coefficients
        if not isinstance(numbers, (tuple, list)) or len(numbers) != 3 or not all(isinstance(n, Real) for n in numbers):
            raise DistIRError(f"expected three ns_coefficients, found {numbers!r}", "Muon")
        if not isinstance(self.ns_steps, int) or not 0 <= self.ns_steps < 100:
            raise DistIRError(f"expected ns_steps from 0 to below 100, found {self.ns_steps!r}", "Muon")
        if self.adjust_lr_fn not in (None, *_ADJUSTED):
            raise DistIRError(f"expected adjust_lr_fn of {', '.join(_ADJUSTED)}, found {self.adjust_lr_fn!r}", "Muon")
        if self.ns_dtype not in (None, "bfloat16", "float32", "float64"):
            raise DistIRError(f"expected ns_dtype of bfloat16, float32 or float64, found {self.ns_dtype!r}", "Muon")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the momentum."""
        return ("momentum_buffer",)

    def update(
        self, g: Builder, parameter: Value, gradient: Value, state: Mapping[str, Value], numbers: Numbers
    ) -> dict[str, Value]:
        """See `Optimizer.update`."""
        kind = parameter.tensor
        if len(kind.shape) != 2:
            raise DistIRError(
                f"expected a matrix, found {parameter.name!r} of shape {kind.shape}", "Muon",
                "give such parameters another optimizer: dr.optim.Groups(dr.optim.AdamW(), "
                '{"*.weight": dr.optim.Muon()})',
            )  # fmt: skip
        beta = float(self.momentum)
        average = momentum = g.emit("moving_average", state["momentum_buffer"], gradient, decay=beta, weight=1 - beta)
        if self.nesterov:
            kept = g.emit("multiply", gradient, g.constant(1 - beta, kind.dtype))
            momentum = g.emit("add_scaled", kept, average, alpha=beta)
        direction = cast(g, self._orthogonal(g, cast(g, momentum, self.ns_dtype or kind.dtype)), kind.dtype)
        scaled = g.emit("multiply", direction, g.constant(self._ratio(*kind.shape), kind.dtype))
        new = g.emit("sgd_step", parameter, scaled, numbers["rate"], decay=float(self.decay_of(parameter)))
        return {"momentum_buffer": average, "": new}

    def _orthogonal(self, g: Builder, x: Value) -> Value:
        """Emit the iteration of Newton and Schulz, which moves all singular values near one."""
        a, b, c = map(float, self.ns_coefficients)
        kind = x.tensor
        is_tall = kind.shape[0] > kind.shape[1]
        if is_tall:
            x = g.emit("permute_dims", x, axes=(1, 0))
        length = g.emit("sqrt", g.emit("sum", g.emit("square", x), axis=(0, 1), keepdims=True))
        x = g.emit("divide", x, g.emit("maximum", length, g.constant(self.eps, kind.dtype)))

        def mixed(first: Value, second: Value, beta: float, alpha: float) -> Value:
            scaled = g.emit("multiply", first, g.constant(beta, kind.dtype))
            result: Value = g.emit("add_scaled", scaled, second, alpha=alpha)
            return result

        for _ in range(self.ns_steps):
            gram = g.emit("matmul", x, g.emit("permute_dims", x, axes=(1, 0)))
            inner = mixed(gram, g.emit("matmul", gram, gram), b, c)
            x = mixed(x, g.emit("matmul", inner, x), a, 1.0)
        return g.emit("permute_dims", x, axes=(1, 0)) if is_tall else x

    def _ratio(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn in (None, "original"):
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns)) if self.adjust_lr_fn == "match_rms_adamw" else 1.0
