"""Norms of vectors, and what is divided by them."""

from __future__ import annotations

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
)

# ATen spellings


@aten("linalg_vector_norm.default")
def _vector_norm(
    g: Builder, x: Value, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if order == 1:
        return g.aten("sum.dim_IntList", g.emit("abs", x), dim, keepdim, dtype=dtype)
    if order != 2:
        raise NotImplementedError(f"norm of order {order}")
    return g.emit("sqrt", g.aten("sum.dim_IntList", g.emit("square", x), dim, keepdim, dtype=dtype))


@aten("norm.ScalarOpt_dim")
def _norm(g: Builder, x: Value, order: float | None, dim: Any, keepdim: bool = False) -> Any:
    return _vector_norm(g, x, 2 if order is None else order, dim, keepdim)


@aten("norm.Scalar")
def _norm_all(g: Builder, x: Value, order: float = 2) -> Any:
    return _vector_norm(g, x, order)


@aten("cosine_similarity.default")
def _cosine_similarity(g: Builder, a: Value, b: Value, dim: int = 1, epsilon: float = 1e-8) -> Any:
    shape = broadcast_shape([a.tensor, b.tensor])
    a, b = broadcast_to(g, a, shape), broadcast_to(g, b, shape)
    axis = [axis_of(dim, len(a.tensor.shape))]
    least = like(g, a, epsilon)
    norms = [g.emit("maximum", g.aten("linalg_vector_norm.default", t, 2, axis, True), least) for t in (a, b)]
    sides = [g.emit("divide", t, norm) for t, norm in zip((a, b), norms, strict=True)]
    return g.aten("sum.dim_IntList", g.emit("multiply", *sides), axis)


# ONNX spellings


@onnx("LpNormalization")
def _onnx_lp_normalization(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    norm = g.aten("linalg_vector_norm.default", x[0], attrs.get("p", 2), [attrs.get("axis", -1)], True)
    zero = g.constant(0, x[0].tensor.dtype)
    return g.emit("where", g.emit("equal", norm, zero), zero, g.emit("divide", x[0], norm))
