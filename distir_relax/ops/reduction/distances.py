"""Pairwise distances: row by row, or between all rows of two matrices."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, like, promote, reshape_to

_LARGE = 25
"""torch computes Euclidean distances by a matrix product above this number of rows."""

# ATen spellings


@aten("pairwise_distance.default")
def _pairwise_distance(
    g: Builder, a: Value, b: Value, order: float = 2, epsilon: float = 1e-6, keepdim: bool = False
) -> Any:
    difference = g.emit("subtract", *promote(g, a, b))
    return g.aten(
        "linalg_vector_norm.default", g.emit("add", difference, like(g, difference, epsilon)), order, [-1], keepdim
    )


@aten("dist.default")
def _dist(g: Builder, a: Value, b: Value, order: float = 2) -> Any:
    return g.aten("linalg_vector_norm.default", g.emit("subtract", *promote(g, a, b)), order)


@aten("cdist.default", "_cdist_forward.default")
def _cdist(g: Builder, a: Value, b: Value, order: float = 2, mode: int | None = None) -> Any:
    """Element ``[i, j]`` is the distance of row `i` of `a` to row `j` of `b`; `mode` is torch's `compute_mode`."""
    rows, columns = a.tensor.shape[-2], b.tensor.shape[-2]
    if order == 2 and (mode == 1 or (not mode and max(rows, columns) > _LARGE)):
        return g.aten("_euclidean_dist.default", a, b)
    lead = a.tensor.shape[:-2], b.tensor.shape[:-2]
    width = a.tensor.shape[-1]
    a, b = reshape_to(g, a, (*lead[0], rows, 1, width)), reshape_to(g, b, (*lead[1], 1, columns, width))
    difference = g.emit("subtract", a, b)
    if order == math.inf and g.training:
        return _largest(g, g.emit("abs", difference))
    return g.aten("linalg_vector_norm.default", difference, order, [-1])


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
