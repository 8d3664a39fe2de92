"""Vector norms, normalization by them, and distances between vectors."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import (
    Attrs,
    Builder,
    OnnxOperands,
    aten,
    axis_of,
    broadcast_shape,
    broadcast_to,
    like,
    onnx,
    promote,
    reshape_to,
)

_LARGE = 25
"""torch computes Euclidean distances by a matrix product above this number of rows."""


def root(g: Builder, x: Value, order: float = 2) -> Any:
    """Return the root of nonnegative numbers; where `x` is 0 the gradient is 0 instead of the infinite slope."""
    if order == 2:
        return g.emit("safe_sqrt", x)
    # `where` multiplies the slope of the branch that is not selected by 0, so both must stay finite.
    zero, none = like(g, x, 0), g.emit("equal", x, like(g, x, 0))
    power = g.emit("power", g.emit("where", none, like(g, x, 1), x), like(g, x, 1 / order))
    return g.emit("where", none, zero, power)


# ATen spellings: norms


@aten("linalg_vector_norm.default", "norm.Scalar", "norm.ScalarOpt_dim")
def _vector_norm(
    g: Builder, x: Value, order: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    order = 2 if order is None else order
    if order == 1:
        return g.aten("sum.dim_IntList", g.emit("abs", x), dim, keepdim, dtype=dtype)
    if order in (math.inf, -math.inf):
        return g.aten("amax.default" if order > 0 else "amin.default", g.emit("abs", x), dim, keepdim)
    if order == 0:
        nonzero = g.emit("not_equal", x, like(g, x, 0))
        return g.aten("sum.dim_IntList", nonzero, dim, keepdim, dtype=dtype or x.tensor.dtype)
    powers = g.emit("square", x) if order == 2 else _powers(g, x, order)
    return root(g, g.aten("sum.dim_IntList", powers, dim, keepdim, dtype=dtype), order)


def _powers(g: Builder, x: Value, order: float) -> Any:
    """Emit ``|x| ** order``; below order 1 the slope at 0 is infinite, and the gradient there is set to 0."""
    size = g.emit("abs", x)
    if order >= 1:
        return g.emit("power", size, like(g, x, order))
    none = g.emit("equal", x, like(g, x, 0))
    some = g.emit("where", none, like(g, x, 1), size)
    at_zero = like(g, x, 0 if order > 0 else math.inf)
    return g.emit("where", none, at_zero, g.emit("power", some, like(g, x, order)))


@aten("frobenius_norm.dim")
def _frobenius_norm(g: Builder, x: Value, dim: Any, keepdim: bool = False) -> Any:
    return _vector_norm(g, x, 2, dim, keepdim)


@aten("linalg_matrix_norm.str_ord")
def _matrix_norm(
    g: Builder, x: Value, order: str = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if order != "fro":
        raise NotImplementedError(f"a matrix norm of order {order}")
    return _vector_norm(g, x, 2, list(dim), keepdim, dtype=dtype)


@aten("linalg_norm.default")
def _linalg_norm(
    g: Builder, x: Value, order: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if order is not None and not (isinstance(dim, int) or len(dim or x.tensor.shape) == 1):
        raise NotImplementedError(f"a matrix norm of order {order}")
    return _vector_norm(g, x, order, dim, keepdim, dtype=dtype)


@aten("_weight_norm.default")
def _weight_norm(g: Builder, direction: Value, length: Value, dim: int = 0) -> Any:
    """Scale each slice along `dim` to a given length (Salimans and Kingma, Weight Normalization, 2016)."""
    others = [i for i in range(len(direction.tensor.shape)) if i != axis_of(dim, len(direction.tensor.shape))]
    norm = _vector_norm(g, direction, 2, others, True)
    return g.emit("multiply", direction, g.emit("divide", length, norm))


@aten("cosine_similarity.default")
def _cosine_similarity(g: Builder, a: Value, b: Value, dim: int = 1, epsilon: float = 1e-8) -> Any:
    shape = broadcast_shape([a.tensor, b.tensor])
    a, b = broadcast_to(g, a, shape), broadcast_to(g, b, shape)
    axis = [axis_of(dim, len(a.tensor.shape))]
    norms = [_vector_norm(g, t, 2, axis, True) for t in (a, b)]
    sides = [g.emit("divide", t, _at_least(g, norm, epsilon)) for t, norm in zip((a, b), norms, strict=True)]
    return g.aten("sum.dim_IntList", g.emit("multiply", *sides), axis)


def _at_least(g: Builder, x: Value, bound: float) -> Any:
    """Clamp `x` from below without changing its gradient, as torch clamps norms under no_grad."""
    missing = g.emit("nn.relu", g.emit("subtract", like(g, x, bound), x))
    return g.emit("add", x, g.emit("stop_gradient", missing))


# ATen spellings: distances


@aten("pairwise_distance.default")
def _pairwise_distance(
    g: Builder, a: Value, b: Value, order: float = 2, epsilon: float = 1e-6, keepdim: bool = False
) -> Any:
    difference = g.emit("subtract", *promote(g, a, b))
    return _vector_norm(g, g.emit("add", difference, like(g, difference, epsilon)), order, [-1], keepdim)


@aten("dist.default")
def _dist(g: Builder, a: Value, b: Value, order: float = 2) -> Any:
    return _vector_norm(g, g.emit("subtract", *promote(g, a, b)), order)


@aten("cdist.default", "_cdist_forward.default")
def _cdist(g: Builder, a: Value, b: Value, order: float = 2, mode: int | None = None) -> Any:
    """Element ``[i, j]`` is the distance of row `i` of `a` to row `j` of `b`; `mode` is torch's `compute_mode`."""
    rows, columns = a.tensor.shape[-2], b.tensor.shape[-2]
    if order == 2 and (mode == 1 or (not mode and max(rows, columns) > _LARGE)):
        return _euclidean_dist(g, a, b)
    lead = a.tensor.shape[:-2], b.tensor.shape[:-2]
    width = a.tensor.shape[-1]
    a, b = reshape_to(g, a, (*lead[0], rows, 1, width)), reshape_to(g, b, (*lead[1], 1, columns, width))
    difference = g.emit("subtract", a, b)
    if order == math.inf and g.training:
        return _largest(g, g.emit("abs", difference))
    return _vector_norm(g, difference, order, [-1])


def _largest(g: Builder, x: Value) -> Any:
    """Return the maximum along the last dim; equal maxima each get the whole gradient, as in torch's distances."""
    top = g.emit("stop_gradient", g.aten("amax.default", x, [-1], True))
    # A sum of zeros that routes the gradient.
    none = g.emit("where", g.emit("equal", x, top), g.emit("subtract", x, top), like(g, x, 0))
    return g.emit("add", g.aten("sum.dim_IntList", none, [-1]), reshape_to(g, top, x.tensor.shape[:-1]))


@aten("_euclidean_dist.default")
def _euclidean_dist(g: Builder, a: Value, b: Value) -> Any:
    """Emit ``|a|^2 + |b|^2 - 2 a b`` with a matrix product; rounding may give a negative number."""
    squares = [g.aten("sum.dim_IntList", g.emit("square", x), [-1], True) for x in (a, b)]
    products = g.aten("matmul.default", a, g.aten("transpose.int", b, -1, -2))
    sums = g.emit("add", squares[0], g.aten("transpose.int", squares[1], -1, -2))
    squared = g.emit("subtract", sums, g.emit("multiply", products, like(g, products, 2)))
    return g.emit("safe_sqrt", g.emit("clip", squared, min=0.0, max=math.inf))


# ONNX spellings


@onnx("LpNormalization")
def _onnx_lp_normalization(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    norm = _vector_norm(g, x[0], attrs.get("p", 2), [attrs.get("axis", -1)], True)
    zero = g.constant(0, x[0].tensor.dtype)
    return g.emit("where", g.emit("equal", norm, zero), zero, g.emit("divide", x[0], norm))
