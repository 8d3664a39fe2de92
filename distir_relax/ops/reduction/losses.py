"""Elementwise losses with a sum or mean reduction."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    Backward,
    Builder,
    Code,
    Cost,
    Semantics,
    Split,
    Trait,
    aten,
    broadcast_shape,
    define,
    flops_per_result,
    gradient_of,
    like,
    operands,
    promote,
    same_types,
)

_REDUCTIONS = {0: "", 1: "mean.default", 2: "sum.default"}


def _bounded_log(x: str) -> str:
    return f"R.maximum(R.log({x}), R.const(-100.0, {{0}}.ty.dtype))"


define(
    "nn.binary_cross_entropy",
    Semantics(
        infer=lambda types, attrs: (TensorType(broadcast_shape(types), types[0].dtype),),
        torch="-({1} * torch.log({0}).clamp(min=-100.0) + (1 - {1}) * torch.log1p(-{0}).clamp(min=-100.0))",
    ),
    Split("..., ... -> ..."),
    cost=Cost(flops=flops_per_result(20.0)),
    code=Code(
        relax=f"R.negative(R.add(R.multiply({{1}}, {_bounded_log('{0}')}), "
        f"R.multiply(R.subtract(R.const(1.0, {{0}}.ty.dtype), {{1}}), "
        f"{_bounded_log('R.subtract(R.const(1.0, {0}.ty.dtype), {0})')})))"
    ),
    # torch bounds the slope at 0 and 1, not the logarithms.
    gradient=gradient_of(
        "divide(multiply(g, subtract(0, 1)), maximum(multiply(subtract(1.0, 0), 0), 1e-12))",
        "multiply(g, subtract(log(subtract(1.0, 0)), log(0)))",
    ),
    traits={Trait.POINTWISE},
)


def _scaled_gradient(b: Backward) -> Value:
    return b.emit("multiply", b.grad, b.number(b.attrs["scale"]))  # type: ignore[no-any-return]


define(
    "squared_error_grad",
    Semantics(infer=same_types, torch="({0} - {1}) * {scale}", linear=(operands(0, 1),)),
    Split("..., ... -> ..."),
    code=Code(relax="R.multiply(R.subtract({0}, {1}), R.const({scale}, {0}.ty.dtype))"),
    gradient=gradient_of(_scaled_gradient, lambda b: b.emit("negative", _scaled_gradient(b))),
    traits={Trait.POINTWISE},
)


def reduce_loss(g: Builder, x: Value, reduction: int) -> Any:
    """Return `x` itself (0), its mean (1), or its sum (2), by torch's numbers for reductions."""
    name = _REDUCTIONS[reduction]
    return g.aten(name, x) if name else x


# ATen spellings


@aten("mse_loss.default")
def _mse_loss(g: Builder, x: Value, target: Value, reduction: int = 1) -> Any:
    return reduce_loss(g, g.emit("square", g.emit("subtract", *promote(g, x, target))), reduction)


@aten("l1_loss.default")
def _l1_loss(g: Builder, x: Value, target: Value, reduction: int = 1) -> Any:
    return reduce_loss(g, g.emit("abs", g.emit("subtract", *promote(g, x, target))), reduction)


@aten("smooth_l1_loss.default")
def _smooth_l1_loss(g: Builder, x: Value, target: Value, reduction: int = 1, beta: float = 1.0) -> Any:
    """Squared differences below `beta`, over twice `beta`; absolute differences above it."""
    if not beta:
        return _l1_loss(g, x, target, reduction)
    return reduce_loss(g, _huber(g, x, target, beta, 1 / beta), reduction)


@aten("huber_loss.default")
def _huber_loss(g: Builder, x: Value, target: Value, reduction: int = 1, delta: float = 1.0) -> Any:
    return reduce_loss(g, _huber(g, x, target, delta, 1.0), reduction)


def _huber(g: Builder, x: Value, target: Value, bound: float, scale: float) -> Any:
    """Emit ``scale d^2 / 2`` of differences below `bound`, continued linearly above it."""
    distance = g.emit("abs", g.emit("subtract", *promote(g, x, target)))
    near = g.emit("less", distance, like(g, distance, bound))
    # Finite in the branch that is not selected, for its gradient.
    small = g.emit("where", near, distance, like(g, distance, 0))
    square = g.emit("multiply", g.emit("square", small), like(g, distance, scale / 2))
    line = g.emit(
        "multiply", g.emit("subtract", distance, like(g, distance, bound / 2)), like(g, distance, scale * bound)
    )
    return g.emit("where", near, square, line)


@aten("soft_margin_loss.default")
def _soft_margin_loss(g: Builder, x: Value, target: Value, reduction: int = 1) -> Any:
    """Emit ``log(1 + exp(-t x))`` without overflow of the exponential."""
    agreed = g.emit("multiply", *promote(g, x, target))
    return reduce_loss(g, g.emit("negative", g.aten("log_sigmoid.default", agreed)), reduction)


@aten("margin_ranking_loss.default")
def _margin_ranking_loss(g: Builder, a: Value, b: Value, target: Value, margin: float = 0.0, reduction: int = 1) -> Any:
    """Emit ``max(0, margin - t (a - b))``."""
    ahead = g.emit("multiply", *promote(g, g.emit("subtract", a, b), target))
    return reduce_loss(g, _hinge(g, ahead, margin), reduction)


@aten("triplet_margin_loss.default")
def _triplet_margin_loss(
    g: Builder, anchor: Value, positive: Value, negative: Value, margin: float = 1.0, order: float = 2,
    epsilon: float = 1e-6, swap: bool = False, reduction: int = 1,
) -> Any:  # fmt: skip
    """Hinge of margin + d(anchor, positive) - d(anchor, negative); `swap` uses min with d(positive, negative)."""
    pairs = [(anchor, positive), (anchor, negative), *[(positive, negative)] * swap]
    near, *far = (g.aten("pairwise_distance.default", a, b, order, epsilon) for a, b in pairs)
    away = g.emit("minimum", *far) if swap else far[0]
    lacking = g.emit("subtract", g.emit("add", near, like(g, near, margin)), away)
    return reduce_loss(g, _clamp_at_zero(g, lacking), reduction)


@aten("cosine_embedding_loss.default")
def _cosine_embedding_loss(
    g: Builder, a: Value, b: Value, target: Value, margin: float = 0.0, reduction: int = 1
) -> Any:
    """``1 - cos`` of the rows' angle where the target is 1, the excess of the cosine over the margin where it is -1."""
    small = like(g, a, 1e-12)

    def along(x: Value, y: Value) -> Any:
        return g.aten("sum.dim_IntList", g.emit("multiply", x, y), [-1])

    sizes = g.emit("multiply", *(g.emit("add", along(x, x), small) for x in (a, b)))
    cosine = g.emit("divide", along(a, b), g.emit("sqrt", sizes))
    near, far = (g.emit("equal", target, like(g, target, sign)) for sign in (1, -1))
    zero, one = like(g, cosine, 0), like(g, cosine, 1)
    excess = _clamp_at_zero(g, g.emit("subtract", cosine, like(g, cosine, margin)))
    sides = g.emit("where", near, g.emit("subtract", one, cosine), zero), g.emit("where", far, excess, zero)
    return reduce_loss(g, g.emit("add", *sides), reduction)


@aten("hinge_embedding_loss.default")
def _hinge_embedding_loss(g: Builder, x: Value, target: Value, margin: float = 1.0, reduction: int = 1) -> Any:
    """`x` where the target is 1, ``max(0, margin - x)`` where it is -1."""
    not_near, not_far = (g.emit("not_equal", target, like(g, target, sign)) for sign in (1, -1))
    zero = like(g, x, 0)
    sides = g.emit("where", not_near, _hinge(g, x, margin), zero), g.emit("where", not_far, x, zero)
    return reduce_loss(g, g.emit("add", *sides), reduction)


def _hinge(g: Builder, x: Value, margin: float) -> Any:
    return _clamp_at_zero(g, g.emit("subtract", like(g, x, margin), x))


def _clamp_at_zero(g: Builder, x: Value) -> Any:
    """Return ``max(x, 0)``; at 0 the gradient passes, as in torch's clamp_min."""
    return g.emit("clip", x, min=0.0, max=math.inf)


@aten("poisson_nll_loss.default")
def _poisson_loss(
    g: Builder, x: Value, target: Value, of_logarithm: bool, full: bool, epsilon: float, reduction: int
) -> Any:
    """``exp(x) - t x``, or ``x - t log x``; if `full`, plus Stirling's formula for the factorial of `t` above 1."""
    x, target = promote(g, x, target)
    rate = g.emit("exp", x) if of_logarithm else x
    log = x if of_logarithm else g.emit("log", g.emit("add", x, like(g, x, epsilon)))
    loss = g.emit("subtract", rate, g.emit("multiply", target, log))
    if full:
        large = g.emit("greater", target, like(g, x, 1))
        some = g.emit("where", large, target, like(g, x, 1))
        log = g.emit("log", some)
        half = g.emit("multiply", g.emit("add", log, like(g, x, math.log(2 * math.pi))), like(g, x, 0.5))
        terms = g.emit("add", g.emit("subtract", g.emit("multiply", some, log), some), half)
        loss = g.emit("add", loss, g.emit("where", large, terms, like(g, x, 0)))
    return reduce_loss(g, loss, reduction)


@aten("kl_div.default")
def _kl_div(g: Builder, x: Value, target: Value, reduction: int = 1, *, log_target: bool = False) -> Any:
    """``t (log t - x)`` of log-probabilities `x`, where 0 log 0 is 0; with a log target ``exp(t) (t - x)``."""
    x, target = promote(g, x, target)
    if log_target:
        return reduce_loss(g, g.emit("multiply", g.emit("exp", target), g.emit("subtract", target, x)), reduction)
    zero = like(g, target, 0)
    none = g.emit("equal", target, zero)
    log = g.emit("log", g.emit("where", none, like(g, target, 1), target))
    return reduce_loss(g, g.emit("multiply", target, g.emit("subtract", log, x)), reduction)


@aten("binary_cross_entropy.default")
def _binary_cross_entropy(g: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = 1) -> Any:
    """``-(y log x + (1 - y) log(1 - x))``, with logarithms clamped at -100 as in torch."""
    loss = g.emit("nn.binary_cross_entropy", *promote(g, x, target))
    return reduce_loss(g, loss if weight is None else g.emit("multiply", *promote(g, loss, weight)), reduction)


@aten("binary_cross_entropy_with_logits.default")
def _binary_cross_entropy_with_logits(
    g: Builder, x: Value, target: Value, weight: Value | None = None, positive: Value | None = None, reduction: int = 1
) -> Any:
    """``-(y log s(x) + (1 - y) log(1 - s(x)))``, without logarithms of zero."""
    x, target, *others = promote(g, *(item for item in (x, target, weight, positive) if item is not None))
    weight = None if weight is None else others[0]
    positive = None if positive is None else others[-1]
    after = g.aten("log_sigmoid.default", x)
    before = g.emit("subtract", after, x)
    if positive is not None:
        after = g.emit("multiply", after, positive)
    other = g.aten("rsub.Scalar", target, 1)
    sides = [g.emit("multiply", target, after), g.emit("multiply", other, before)]
    loss = g.emit("negative", g.emit("add", *sides))
    return reduce_loss(g, loss if weight is None else g.emit("multiply", loss, weight), reduction)
