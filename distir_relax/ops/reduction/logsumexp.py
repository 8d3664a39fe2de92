"""Log-sum-exp."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.reduction.reduction_axes import reduced_shape, reduces_all
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, filled, like, onnx, promote, reshape_to

# ATen spellings


@aten("logsumexp.default")
def _logsumexp(g: Builder, x: Value, dim: list[int], keepdim: bool = False) -> Any:
    """Subtract the maximum first, so that no exponential overflows; an infinite maximum is the result."""
    (x,) = promote(g, x, floating=True)
    if reduces_all(x, dim):
        return filled(g, reduced_shape(x, dim, keepdim), -math.inf, x.tensor.dtype)
    largest = g.aten("amax.default", x, dim, True)
    finite = g.emit("where", g.emit("isfinite", largest), largest, like(g, x, 0))
    total = g.aten("sum.dim_IntList", g.emit("exp", g.emit("subtract", x, finite)), dim, True)
    y = g.emit("add", g.emit("log", total), finite)
    return y if keepdim else g.aten("squeeze.dims", y, [dim] if isinstance(dim, int) else dim)


# ONNX spellings


@onnx("ReduceLogSumExp")
def _onnx_log_sum_exp(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    """Subtract the maximum first, so that no exponential overflows."""
    axes, keep = x.numbers(1, attrs.get("axes")), bool(attrs.get("keepdims", 1))
    if not x[0].tensor.elements:
        raise NotImplementedError("the largest of no elements")
    largest = g.aten("amax.default", x[0], axes, True)
    total = g.aten("sum.dim_IntList", g.emit("exp", g.emit("subtract", x[0], largest)), axes, True)
    y = g.emit("add", g.emit("log", total), largest)
    return y if keep else reshape_to(g, y, g.aten("amax.default", x[0], axes, False).tensor.shape)
