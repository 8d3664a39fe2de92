"""The spellings of scattering along one dim, of one-hot codes and of histograms."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ops.indexing import counted_from_front
from distir_relax.ops.pointwise import cast
from distir_relax.ops.registry import Attrs, aten, onnx_spelling, relax_spelling
from distir_relax.ops.scatter import REDUCTIONS, one_hot, spread_to, write_elements, write_rows
from distir_relax.ops.shape import axis_of, reshape_to


def _like(g: Any, x: Any, value: Any) -> Any:
    """A number, or a tensor, in the dtype of `x`."""
    return cast(g, value, x.type.dtype) if hasattr(value, "type") else g.constant(value, x.type.dtype)


def _covered(g: Any, source: Any, index: Any) -> Any:
    """The part of `source` that an index of this shape reads: its beginning along each dim; a number is for all."""
    if not source.type.shape:
        return spread_to(g, source, index.type.shape)
    for d, (have, want) in enumerate(zip(source.type.shape, index.type.shape, strict=True)):
        if have != want:
            source = g.emit("strided_slice", source, axes=(d,), begin=(0,), end=(want,), strides=(1,))
    return source


# ATen spellings


@aten("scatter.src", "scatter.value", "scatter_.src", "scatter_.value", "scatter.reduce", "scatter.value_reduce")
def _scatter(g: Any, x: Any, dim: int, index: Any, source: Any, *, reduce: str = "update") -> Any:
    how = {"multiply": "mul"}.get(reduce, reduce)
    updates = _covered(g, _like(g, x, source), index)
    return write_elements(g, x, axis_of(dim, len(x.type.shape)), index, updates, how)


@aten("scatter_add.default", "scatter_add_.default")
def _scatter_add(g: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scatter(g, x, dim, index, source, reduce="add")


_NEUTRAL = {"add": 0, "mul": 1, "max": -math.inf, "min": math.inf}


@aten("scatter_reduce.two", "scatter_reduce_.two")
def _scatter_reduce(
    g: Any, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    how = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}[reduce]
    if "float" not in x.type.dtype and (reduce == "mean" or (not include_self and how in ("max", "min"))):
        raise NotImplementedError(f"a scatter of {x.type.dtype} by {reduce!r} without the elements that are there")
    y = x if include_self else _scatter(g, x, dim, index, g.constant(_NEUTRAL[how], x.type.dtype))
    y = _scatter(g, y, dim, index, source, reduce=how)
    if reduce != "mean":
        return y
    one, zero = g.constant(1, x.type.dtype), g.constant(0, x.type.dtype)
    count = spread_to(g, one if include_self else zero, x.type.shape)
    count = _scatter(g, count, dim, index, one, reduce="add")
    return g.emit("divide", y, g.emit("maximum", count, one))


@aten("index_add.default", "index_add_.default")
def _index_add(g: Any, x: Any, dim: int, ids: Any, source: Any, *, alpha: float = 1) -> Any:
    source = source if alpha == 1 else g.emit("multiply", source, g.constant(alpha, source.type.dtype))
    return write_rows(g, x, axis_of(dim, len(x.type.shape)), ids, source, "add")


@aten("index_copy.default", "index_copy_.default")
def _index_copy(g: Any, x: Any, dim: int, ids: Any, source: Any) -> Any:
    return write_rows(g, x, axis_of(dim, len(x.type.shape)), ids, source, "update")


@aten("index_fill.int_Scalar", "index_fill.int_Tensor", "index_fill_.int_Scalar", "index_fill_.int_Tensor")
def _index_fill(g: Any, x: Any, dim: int, ids: Any, value: Any) -> Any:
    axis = axis_of(dim, len(x.type.shape))
    shape = tuple(ids.type.elements if d == axis else n for d, n in enumerate(x.type.shape))
    return write_rows(g, x, axis, ids, spread_to(g, _like(g, x, value), shape), "update")


@aten("one_hot.default")
def _one_hot(g: Any, ids: Any, depth: int = -1) -> Any:
    if depth < 0:
        raise NotImplementedError("as many classes as the largest number asks for: the shape depends on data")
    return one_hot(g, ids, depth, -1, g.constant(1, "int64"), g.constant(0, "int64"))


@aten("histc.default")
def _histc(g: Any, x: Any, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """The elements between `low` and `high`, counted in `bins` intervals of one width, the last one closed."""
    if low >= high:
        raise NotImplementedError("a histogram between the least and the largest element, a range that depends on data")
    x = reshape_to(g, x, (x.type.elements,))
    dtype = x.type.dtype
    first, last = g.constant(low, dtype), g.constant(high, dtype)
    inside = g.emit("logical_and", g.emit("greater_equal", x, first), g.emit("less_equal", x, last))
    place = g.emit("divide", g.emit("subtract", x, first), g.constant(high - low, dtype))
    ids = cast(g, g.emit("multiply", place, g.constant(bins, dtype)), "int64")
    ids = g.emit("clip", ids, min=0, max=bins - 1)
    return g.emit("segment_sum", cast(g, inside, dtype), ids, num_segments=bins)


# Relax spellings


@relax_spelling("relax.scatter_elements")
def _relax_scatter(g: Any, args: Any, attrs: Any) -> Any:
    axis = axis_of(attrs["axis"], len(args[0].type.shape))
    if attrs["reduction"] not in REDUCTIONS:
        raise NotImplementedError(f"a reduction by {attrs['reduction']!r}")
    return write_elements(g, args[0], axis, args[1], args[2], attrs["reduction"])


@relax_spelling("relax.one_hot")
def _relax_one_hot(g: Any, args: Any, attrs: Any) -> Any:
    ids, *numbers = args
    # What Relax makes of Python numbers.
    dtype = "float64" if any(isinstance(n, float) for n in numbers) else "int64"
    on, off = (g.constant(n, dtype) for n in numbers)
    return one_hot(g, ids, attrs["depth"], attrs["axis"], on, off)


@relax_spelling("relax.arange")
def _relax_arange(g: Any, args: Any, attrs: Any) -> Any:
    start, end, step = args
    return g.emit("arange", start=start, end=end, step=step, dtype=attrs["dtype"])


# ONNX spellings

_ONNX_REDUCTIONS = {"none": "update", "add": "add", "mul": "mul", "max": "max", "min": "min"}


def onnx_reduction(attrs: Attrs) -> str:
    """How an ONNX scatter joins what it writes with what is there."""
    return _ONNX_REDUCTIONS[attrs.get("reduction", "none")]


@onnx_spelling("ScatterElements", "Scatter")
def _onnx_scatter(g: Any, x: Any, attrs: Any) -> Any:
    axis = axis_of(attrs.get("axis", 0), len(x[0].type.shape))
    ids = counted_from_front(g, x, 1, x[0].type.shape[axis])
    return write_elements(g, x[0], axis, ids, x[2], onnx_reduction(attrs))


@onnx_spelling("OneHot")
def _onnx_one_hot(g: Any, x: Any, attrs: Any) -> Any:
    depth, values = int(x.number(1)), x[2]
    ids = cast(g, counted_from_front(g, x, 0, depth), "int64")
    off, on = (reshape_to(g, part, ()) for part in g.emit("split", values, sizes=(1, 1), axis=0))
    return one_hot(g, ids, depth, attrs.get("axis", -1), on, off)
