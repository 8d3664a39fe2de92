"""Variances and standard deviations, decomposed into means."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.layout import floor_divide, is_symbolic, maximum
from distir_relax.ops.reduction.norms import root
from distir_relax.ops.reduction.reduction_axes import relax_axes
from distir_relax.ops.table import Attrs, Builder, aten, ratio, relax

# ATen spellings


@aten("var.correction")
def _var(g: Builder, x: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    mean = g.aten("mean.dim", x, dim, True)
    squares = g.emit("square", g.emit("subtract", x, mean))
    count = floor_divide(x.tensor.elements, maximum(1, mean.tensor.elements))
    variance = g.aten("mean.dim", squares, dim, keepdim)
    bessel = 1 if correction is None else correction
    if bessel == 0:
        return variance
    # With no more elements than the correction, the squares are divided by zero.
    divisor: Any = maximum(0, count - int(bessel)) if is_symbolic(count) else max(0, count - bessel)
    return g.emit("multiply", variance, ratio(g, count, divisor, x.tensor.dtype))


@aten("var.dim")
def _var_dim(g: Builder, x: Value, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _var(g, x, dim, correction=int(unbiased), keepdim=keepdim)


@aten("std.correction")
def _std(g: Builder, x: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return root(g, _var(g, x, dim, correction=correction, keepdim=keepdim))


@aten("std.dim")
def _std_dim(g: Builder, x: Value, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _std(g, x, dim, correction=int(unbiased), keepdim=keepdim)


@aten("var_mean.correction")
def _var_mean(g: Builder, x: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    variance = g.aten("var.correction", x, dim, correction=correction, keepdim=keepdim)
    return variance, g.aten("mean.dim", x, dim, keepdim)


@aten("std_mean.correction")
def _std_mean(g: Builder, x: Value, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    variance, mean = _var_mean(g, x, dim, correction=correction, keepdim=keepdim)
    return root(g, variance), mean


@aten("var.default")
def _var_all(g: Builder, x: Value, unbiased: bool = True) -> Any:
    return _var(g, x, None, correction=int(unbiased))


@aten("std.default")
def _std_all(g: Builder, x: Value, unbiased: bool = True) -> Any:
    return _std(g, x, None, correction=int(unbiased))


@aten("var_mean.dim")
def _var_mean_dim(g: Builder, x: Value, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _var_mean(g, x, dim, correction=int(unbiased), keepdim=keepdim)


# Relax spellings


@relax("relax.variance", "relax.std")
def _relax_variance(g: Builder, args: Any, attrs: Attrs) -> Any:
    name = {"relax.variance": "var", "relax.std": "std"}[attrs["op"]]
    axes = relax_axes(args[0], attrs["axis"])
    return g.aten(f"{name}.correction", args[0], axes, correction=0, keepdim=attrs["keepdims"])
