"""Vector norms and normalization by them."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.reduction.power_roots import root
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
)

# ATen spellings


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
    norms = [g.aten("linalg_vector_norm.default", t, 2, axis, True) for t in (a, b)]
    sides = [g.emit("divide", t, _at_least(g, norm, epsilon)) for t, norm in zip((a, b), norms, strict=True)]
    return g.aten("sum.dim_IntList", g.emit("multiply", *sides), axis)


def _at_least(g: Builder, x: Value, bound: float) -> Any:
    """Clamp `x` from below without changing its gradient, as torch clamps norms under no_grad."""
    missing = g.emit("nn.relu", g.emit("subtract", like(g, x, bound), x))
    return g.emit("add", x, g.emit("stop_gradient", missing))


# ONNX spellings


@onnx("LpNormalization")
def _onnx_lp_normalization(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    norm = g.aten("linalg_vector_norm.default", x[0], attrs.get("p", 2), [attrs.get("axis", -1)], True)
    zero = g.constant(0, x[0].tensor.dtype)
    return g.emit("where", g.emit("equal", norm, zero), zero, g.emit("divide", x[0], norm))
