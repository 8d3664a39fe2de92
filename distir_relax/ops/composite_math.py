"""Further norms, activations and products of ATen, written as entries of the table."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ops.pointwise import broadcast, promote
from distir_relax.ops.registry import aten, lookup_aten
from distir_relax.ops.scatter import spread_to
from distir_relax.ops.shape import axis_of, reshape_to


def _aten(g: Any, spelling: str, *args: Any, **kwargs: Any) -> Any:
    convert = lookup_aten(spelling)
    assert convert is not None, spelling
    return convert(g, *args, **kwargs)


def _number(g: Any, like: Any, value: float) -> Any:
    return g.constant(value, like.type.dtype)


# Activations


@aten("mish.default")
def _mish(g: Any, x: Any) -> Any:
    return g.emit("multiply", x, g.emit("tanh", _aten(g, "softplus.default", x)))


@aten("selu.default")
def _selu(g: Any, x: Any) -> Any:
    """With the constants of Klambauer et al., Self-Normalizing Neural Networks, 2017."""
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return g.emit("multiply", _aten(g, "elu.default", x, alpha), _number(g, x, scale))


@aten("celu.default")
def _celu(g: Any, x: Any, alpha: float = 1.0) -> Any:
    scaled = g.emit("divide", x, _number(g, x, alpha))
    return g.emit("multiply", _aten(g, "elu.default", scaled), _number(g, x, alpha))


@aten("log_sigmoid.default")
def _log_sigmoid(g: Any, x: Any) -> Any:
    """``min(x, 0) - log(1 + exp(-|x|))``, in which no exponential overflows."""
    tail = g.emit("exp", g.emit("negative", g.emit("abs", x)))
    return g.emit("subtract", g.emit("minimum", x, _number(g, x, 0)), _aten(g, "log1p.default", tail))


@aten("prelu.default")
def _prelu(g: Any, x: Any, slope: Any) -> Any:
    rank = len(x.type.shape)
    wide = tuple(slope.type.elements if d == 1 else 1 for d in range(rank)) if slope.type.elements > 1 else (1,) * rank
    below = g.emit("multiply", x, reshape_to(g, slope, wide))
    return g.emit("where", g.emit("greater", x, _number(g, x, 0)), x, below)


@aten("threshold.default")
def _threshold(g: Any, x: Any, limit: float, value: float) -> Any:
    return g.emit("where", g.emit("greater", x, _number(g, x, limit)), x, _number(g, x, value))


@aten("exp2.default")
def _exp2(g: Any, x: Any) -> Any:
    return g.emit("exp", g.emit("multiply", x, _number(g, x, math.log(2))))


@aten("log10.default")
def _log10(g: Any, x: Any) -> Any:
    return g.emit("multiply", g.emit("log", x), _number(g, x, 1 / math.log(10)))


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(g: Any, a: Any, b: Any, share: Any) -> Any:
    way = g.emit("subtract", *promote(g, b, a))
    return g.emit("add", *promote(g, a, g.emit("multiply", *promote(g, way, share))))


@aten("nan_to_num.default")
def _nan_to_num(g: Any, x: Any, nan: float | None = None, high: float | None = None, low: float | None = None) -> Any:
    import torch

    limits = torch.finfo(getattr(torch, x.type.dtype))
    y = g.emit("where", g.emit("isnan", x), _number(g, x, nan or 0.0), x)
    for value, infinity in (
        (limits.max if high is None else high, math.inf),
        (limits.min if low is None else low, -math.inf),
    ):
        y = g.emit("where", g.emit("equal", x, _number(g, x, infinity)), _number(g, x, value), y)
    return y


# Products and reductions


@aten("mv.default", "dot.default")
def _product(g: Any, a: Any, b: Any) -> Any:
    return _aten(g, "matmul.default", a, b)


@aten("logsumexp.default")
def _logsumexp(g: Any, x: Any, dim: list[int], keepdim: bool = False) -> Any:
    """The largest element is taken out first, so that no exponential overflows; where it is infinite, it is the sum."""
    largest = _aten(g, "amax.default", x, dim, True)
    finite = g.emit("where", g.emit("isfinite", largest), largest, _number(g, x, 0))
    total = _aten(g, "sum.dim_IntList", g.emit("exp", g.emit("subtract", x, finite)), dim, True)
    y = g.emit("add", g.emit("log", total), finite)
    return y if keepdim else _aten(g, "squeeze.dims", y, [dim] if isinstance(dim, int) else dim)


@aten("var_mean.correction")
def _var_mean(g: Any, x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    variance = _aten(g, "var.correction", x, dim, correction=correction, keepdim=keepdim)
    return variance, _aten(g, "mean.dim", x, dim, keepdim)


@aten("var_mean.dim")
def _var_mean_dim(g: Any, x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _var_mean(g, x, dim, correction=int(unbiased), keepdim=keepdim)


@aten("count_nonzero.default", "count_nonzero.dim_IntList")
def _count_nonzero(g: Any, x: Any, dim: Any = None) -> Any:
    truth = x if x.type.dtype == "bool" else g.emit("not_equal", x, _number(g, x, 0))
    return _aten(g, "sum.dim_IntList", truth, dim)


@aten("cosine_similarity.default")
def _cosine_similarity(g: Any, a: Any, b: Any, dim: int = 1, epsilon: float = 1e-8) -> Any:
    shape = broadcast([a.type, b.type])
    a, b = spread_to(g, a, shape), spread_to(g, b, shape)
    axis = [axis_of(dim, len(a.type.shape))]
    least = _number(g, a, epsilon)
    norms = [g.emit("maximum", _aten(g, "linalg_vector_norm.default", t, 2, axis, True), least) for t in (a, b)]
    sides = [g.emit("divide", t, norm) for t, norm in zip((a, b), norms, strict=True)]
    return _aten(g, "sum.dim_IntList", g.emit("multiply", *sides), axis)
