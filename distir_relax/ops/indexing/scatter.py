"""Scatters and histograms: writes to data-dependent positions.

If the dim that is written to is split, each device writes the elements of its own part; all others go to an extra row
that is then cut off. An accumulating scatter of whole rows is a segment sum (`distir_relax.ops.indexing.segment_sum`)
that is added to the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import PerRank, Size, TensorType, Value
from distir_relax.layout import is_always
from distir_relax.ops.indexing.index_bounds import check_range
from distir_relax.ops.indexing.segment_sum import drop_extra_row, local_row_ids, sum_segments
from distir_relax.ops.indexing.take import nonnegative_operand, to_nonnegative
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Expansion,
    Gradient,
    OnnxOperands,
    Order,
    Overwriting,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    axis_in,
    axis_of,
    broadcast_shape,
    broadcast_to,
    cast,
    define,
    filled,
    like,
    onnx,
    operands,
    parse_rule,
    promote,
    relax,
    reshape_to,
)

# Reductions that combine written elements with existing ones: our names (Relax's) and torch's.
REDUCTIONS = {"update": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


# scatter_elements: result[index[i][j]][j] = updates[i][j] for axis 0, the rest as in data


def _infer_scatter(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, index, updates = types
    axis = attrs["axis"]
    if attrs["reduction"] not in REDUCTIONS:
        raise ValueError(f"expected a reduction of {', '.join(REDUCTIONS)}")
    if not len(data.shape) == len(index.shape) > axis >= 0 or "int" not in index.dtype:
        raise ValueError(f"expected an integer index of {len(data.shape)} dims, and an axis among them")
    if index.shape != updates.shape or updates.dtype != data.dtype:
        raise ValueError(f"expected updates of the index's shape {index.shape} and the data's dtype {data.dtype}")
    if any(n != m for d, (n, m) in enumerate(zip(data.shape, index.shape, strict=True)) if d != axis):
        raise ValueError(
            f"expected an index of the data's shape {data.shape} but along dim {axis}, found {index.shape}"
        )
    return (data,)


def _scatter_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    count, axis = len(types[0].shape), attrs["axis"]
    data_dims = " ".join("axis" if d == axis else f"d{d}" for d in range(count))
    index_dims = data_dims.replace("axis", "[written]")
    return parse_rule(
        f"{data_dims}, {index_dims}, {index_dims} -> {data_dims}", [t.shape for t in types], [results[0].shape]
    )


def _split_scatter(x: Expansion) -> tuple[Value, ...]:
    data, index, updates = x.operands
    axis, rank = x.attrs["axis"], len(x.types[0].shape)
    if x.attrs["reduction"] == "add" and _all_have_some(x.local_size):
        # Updates for other devices add zero to the first element of this one.
        row, mine = x.local_rows(index, x.types[1].dtype)
        none = x.emit("constant", value=0, dtype=x.types[1].dtype)
        dtype = x.types[2].dtype
        nothing = x.emit("constant", value=0.0 if "float" in dtype else 0, dtype=dtype)
        rows, added = x.emit("where", mine, row, none), x.emit("where", mine, updates, nothing)
        return (x.emit("scatter_elements", data, rows, added, **x.attrs),)
    more = tuple(int(d == axis) for d in range(rank))
    wide = x.emit("pad", data, low=(0,) * rank, high=more, value=0)
    rows = local_row_ids(x, index, x.types[1].dtype)
    return (drop_extra_row(x, x.emit("scatter_elements", wide, rows, updates, **x.attrs), axis),)


def _all_have_some(size: Size) -> bool:
    sizes = size.values if isinstance(size, PerRank) else (size,)
    return all(is_always(0, "<", n) is True for n in sizes)


def _torch_scatter(attrs: Attrs, in_place: bool = False) -> str:
    how, end = REDUCTIONS[attrs["reduction"]], "_" if in_place else ""
    if not how:
        return f"{{0}}.scatter{end}({{axis}}, {{1}}.long(), {{2}})"
    return f'{{0}}.scatter_reduce{end}({{axis}}, {{1}}.long(), {{2}}, "{how}")'


def _scatter_gradient(b: Backward) -> tuple[Value | None, ...]:
    """Return the gradients of the data elements that remain, and of the written updates."""
    _, index, updates = b.op.operands
    axis, how = b.attrs["axis"], b.attrs["reduction"]
    if how in ("max", "min"):
        return _extremes_gradient(b)
    if how == "mul":
        return _products_gradient(b)
    of_updates: Value = b.emit("gather_elements", b.grad, index, axis=axis)
    if how == "add":
        return b.grad, None, of_updates
    return b.emit("scatter_elements", b.grad, index, b.zeros(updates), axis=axis, reduction="update"), None, of_updates


def _extremes_gradient(b: Backward) -> tuple[Value, None, Value]:
    """Distribute the gradient equally among all elements that equal the extreme, as torch does."""
    data, index, updates = b.op.operands
    axis, dtype = b.attrs["axis"], data.tensor.dtype
    here = cast(b.g, b.emit("equal", data, b.y()), dtype)
    there = cast(b.g, b.emit("equal", updates, b.emit("gather_elements", b.y(), index, axis=axis)), dtype)
    count = b.emit("scatter_elements", here, index, there, axis=axis, reduction="add")
    share = b.emit("divide", b.grad, count)
    of_updates = b.emit("multiply", there, b.emit("gather_elements", share, index, axis=axis))
    return b.emit("multiply", here, share), None, of_updates


def _products_gradient(b: Backward) -> tuple[Value, None, Value]:
    """Return the product of all other factors; if exactly one is zero, its gradient is the product of the others."""
    data, index, updates = b.op.operands
    axis, zero, one = b.attrs["axis"], b.number(0.0), b.number(1.0)
    zero_masks = [b.emit("equal", x, zero) for x in (data, updates)]
    factors = [b.emit("where", none, one, x) for none, x in zip(zero_masks, (data, updates), strict=True)]
    zeros = [cast(b.g, none, data.tensor.dtype) for none in zero_masks]
    count = b.emit("scatter_elements", zeros[0], index, zeros[1], axis=axis, reduction="add")
    product = b.emit("scatter_elements", factors[0], index, factors[1], axis=axis, reduction="mul")
    product = b.emit("multiply", b.grad, product)
    both = [(count, product), tuple(b.emit("gather_elements", x, index, axis=axis) for x in (count, product))]
    of_data, of_updates = (
        b.emit("where", b.emit("equal", of_all, own), b.emit("divide", others, factor), zero)
        for (of_all, others), own, factor in zip(both, zeros, factors, strict=True)
    )
    return of_data, None, of_updates


define(
    "scatter_elements",
    Semantics(
        infer=_infer_scatter,
        torch=_torch_scatter,
        linear=lambda count, attrs: (operands(0, 2),) if attrs["reduction"] in ("update", "add") else (),
    ),
    Split(
        _scatter_rule,
        expand={"axis": _split_scatter},
        positional=frozenset({"axis"}),
        indices=operands(1),
        order=Order(writes=lambda attrs: attrs["reduction"] == "update"),
    ),
    cost=Cost(flops=lambda types, attrs, results: float(types[2].elements)),
    code=Code(relax="R.scatter_elements({0}, {1}, {2}, {axis}, {reduction})"),
    kernels=[Overwriting(lambda attrs: _torch_scatter(attrs, in_place=True), operands(0))],
    gradient=Gradient(all=_scatter_gradient),
)


# Forms that the entries do not have


def write_rows(g: Builder, x: Value, axis: int, ids: Value, rows: Value, reduction: str) -> Any:
    """Write `rows` to dim `axis` of `x` at `ids`, a vector or a number, or combine them with the rows there."""
    shape, count = x.tensor.shape, ids.tensor.elements
    if not shape:
        return reshape_to(g, write_rows(g, reshape_to(g, x, (1,)), 0, ids, rows, reduction), ())
    if reduction == "add" and x.tensor.dtype == "bool":
        # Devices sum integers, not booleans.
        total = write_rows(g, cast(g, x, "int32"), axis, ids, cast(g, rows, "int32"), reduction)
        return g.emit("not_equal", total, g.constant(0, "int32"))
    rank, ids = len(shape), reshape_to(g, ids, (count,))
    rows = reshape_to(g, rows, (*shape[:axis], count, *shape[axis + 1 :]))
    if reduction == "add":
        return g.emit("add", x, sum_segments(g, rows, axis, ids, shape[axis]))
    ids = reshape_to(g, ids, tuple(ids.tensor.elements if d == axis else 1 for d in range(rank)))
    ids = broadcast_to(g, ids, rows.tensor.shape)
    return g.emit("scatter_elements", x, ids, rows, axis=axis, reduction=reduction)


def write_points(
    g: Builder, x: Value, dims: Sequence[int], indices: Sequence[Any], values: Value, reduction: str
) -> Any:
    """Write `values` to the points of `x` with `indices` into its dims `dims`, or combine them with the elements there.

    The indices broadcast to one shape and are nonnegative. In `values`, which broadcast too, that shape replaces the
    indexed dims if they are adjacent, and comes first otherwise.
    """
    rest = [d for d in range(len(x.tensor.shape)) if d not in dims]
    sizes, others = [x.tensor.shape[d] for d in dims], tuple(x.tensor.shape[d] for d in rest)
    picked = broadcast_shape([ids.tensor for ids in indices])
    adjacent = list(dims) == list(range(dims[0], dims[-1] + 1))
    count, home = math.prod(picked), dims[0] if adjacent else 0
    values = broadcast_to(g, values, (*others[:home], *picked, *others[home:]))
    if home and picked:
        lead = range(home, home + len(picked))
        values = g.emit(
            "permute_dims", values, axes=(*lead, *range(home), *range(lead.stop, lead.stop - home + len(others)))
        )
    rows = reshape_to(g, values, (count, *others))
    order = (*dims, *rest)
    moved = order != tuple(range(len(order)))
    y = g.emit("permute_dims", x, axes=order) if moved else x
    flat = reshape_to(g, broadcast_to(g, flatten_indices(g, indices, sizes), picked), (count,))
    result = write_rows(g, reshape_to(g, y, (math.prod(sizes), *others)), 0, flat, rows, reduction)
    result = reshape_to(g, result, y.tensor.shape)
    return g.emit("permute_dims", result, axes=tuple(map(order.index, range(len(order))))) if moved else result


def flatten_indices(g: Builder, indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Combine nonnegative indices into dims of `sizes` into one index into the flattened dim."""
    flat = indices[0]
    for ids, size in zip(indices[1:], sizes[1:], strict=True):
        scaled = g.emit("multiply", flat, g.constant(size, flat.tensor.dtype))
        flat = g.emit("add", *promote(g, scaled, ids))
    return flat


def write_elements(g: Builder, x: Value, axis: int, ids: Value, updates: Value, reduction: str) -> Any:
    """Emit ``x[ids[i][j]][j] = updates[i][j]`` for axis 0, or combine with the elements there.

    An index that covers only the beginning of the other dims is expanded to points with indices into all dims.
    """
    sizes, shape = x.tensor.shape, ids.tensor.shape
    if not ids.tensor.elements:
        return x
    if not sizes or not shape:
        x, ids, updates = (reshape_to(g, t, (t.tensor.elements,)) for t in (x, ids, updates))
        return reshape_to(g, write_elements(g, x, 0, ids, updates, reduction), sizes)
    if all(n == m for d, (n, m) in enumerate(zip(sizes, shape, strict=True)) if d != axis):
        return g.emit("scatter_elements", x, ids, updates, axis=axis, reduction=reduction)
    indices = []
    for d, count in enumerate(shape):
        places = g.emit("arange", start=0, end=count, stride=1, dtype=ids.tensor.dtype)
        indices.append(
            ids if d == axis else reshape_to(g, places, tuple(count if i == d else 1 for i in range(len(shape))))
        )
    return write_points(g, x, range(len(sizes)), indices, updates, reduction)


def _crop_to_index(g: Builder, source: Value, index: Value) -> Any:
    """Return the beginning of each dim of `source`, as an index of this shape reads it; a number is broadcast."""
    if not index.tensor.elements:
        return filled(g, index.tensor.shape, 0, source.tensor.dtype)
    if not source.tensor.shape:
        return broadcast_to(g, source, index.tensor.shape)
    if not index.tensor.shape:
        source = g.emit("strided_slice", source, axes=(0,), begin=(0,), end=(1,), strides=(1,))
        return reshape_to(g, source, ())
    for d, (have, want) in enumerate(zip(source.tensor.shape, index.tensor.shape, strict=True)):
        if have != want:
            source = g.emit("strided_slice", source, axes=(d,), begin=(0,), end=(want,), strides=(1,))
    return source


# ATen spellings


@aten("scatter.src", "scatter.value", "scatter_.src", "scatter_.value", "scatter.reduce", "scatter.value_reduce")
def _scatter(g: Builder, x: Value, dim: int, index: Value, source: Any, *, reduce: str = "update") -> Any:
    how = {"multiply": "mul"}.get(reduce, reduce)
    return _combine(g, x, dim, _check_index(g, x, dim, index, "scatter"), source, how)


@aten("scatter_add.default", "scatter_add_.default")
def _scatter_add(g: Builder, x: Value, dim: int, index: Value, source: Value) -> Any:
    return _combine(g, x, dim, _check_index(g, x, dim, index, "scatter_add"), source, "add")


def _check_index(g: Builder, x: Value, dim: int, index: Value, user: str) -> Any:
    """Return the index of `user` along dim `dim` of `x`, with bounds checked."""
    return check_range(g, index, x.tensor.shape[dim] if x.tensor.shape else 1, user)


def _combine(g: Builder, x: Value, dim: int, index: Value, source: Any, reduction: str) -> Any:
    """Write `source`, a number or a tensor with an element per index, to `x`, or combine it with the elements there."""
    updates = _crop_to_index(g, like(g, x, source), index)
    return write_elements(g, x, axis_of(dim, max(1, len(x.tensor.shape))), index, updates, reduction)


_NEUTRAL = {"add": 0, "mul": 1, "max": -math.inf, "min": math.inf}


@aten("scatter_reduce.two", "scatter_reduce_.two")
def _scatter_reduce(
    g: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Any:
    how = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}[reduce]
    if "float" not in x.tensor.dtype and (reduce == "mean" or (not include_self and how in ("max", "min"))):
        raise NotImplementedError(f"a scatter of {x.tensor.dtype} by {reduce!r} without the existing elements")
    index = _check_index(g, x, dim, index, "scatter_reduce")
    y = x if include_self else _combine(g, x, dim, index, g.constant(_NEUTRAL[how], x.tensor.dtype), "update")
    y = _combine(g, y, dim, index, source, how)
    if reduce != "mean":
        return y
    one, zero = g.constant(1, x.tensor.dtype), g.constant(0, x.tensor.dtype)
    count = broadcast_to(g, one if include_self else zero, x.tensor.shape)
    count = _combine(g, count, dim, index, one, "add")
    return g.emit("divide", y, g.emit("maximum", count, one))


@aten("index_add.default", "index_add_.default")
def _index_add(g: Builder, x: Value, dim: int, ids: Value, source: Value, *, alpha: float = 1) -> Any:
    source = source if alpha == 1 else g.emit("multiply", source, g.constant(alpha, source.tensor.dtype))
    return write_rows(g, x, axis_in(x, dim), _check_index(g, x, dim, ids, "index_add"), source, "add")


@aten("index_copy.default", "index_copy_.default")
def _index_copy(g: Builder, x: Value, dim: int, ids: Value, source: Value) -> Any:
    return write_rows(g, x, axis_in(x, dim), _check_index(g, x, dim, ids, "index_copy"), source, "update")


@aten("index_fill.int_Scalar", "index_fill.int_Tensor", "index_fill_.int_Scalar", "index_fill_.int_Tensor")
def _index_fill(g: Builder, x: Value, dim: int, ids: Value, value: Any) -> Any:
    """Fill by a mask of the indices, so that a repeated index counts once in the gradient of `value`."""
    axis, rank = axis_in(x, dim), len(x.tensor.shape)
    size = x.tensor.shape[axis] if rank else 1
    ids = to_nonnegative(g, reshape_to(g, ids, (ids.tensor.elements,)), size, "index_fill")
    marked = write_rows(g, filled(g, (size,), 0, "int32"), 0, ids, filled(g, ids.tensor.shape, 1, "int32"), "update")
    wide = tuple(size if d == axis else 1 for d in range(rank))
    mask = g.emit("not_equal", reshape_to(g, marked, wide), g.constant(0, "int32"))
    return g.emit("where", mask, like(g, x, value), x)


@aten("histc.default")
def _histc(g: Builder, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """Count the elements between `low` and `high` in `bins` intervals of equal width, the last one closed."""
    if low >= high:
        raise NotImplementedError("a histogram between the least and the largest element, a range that depends on data")
    x = reshape_to(g, x, (x.tensor.elements,))
    dtype = x.tensor.dtype
    first, last = g.constant(low, dtype), g.constant(high, dtype)
    inside = g.emit("logical_and", g.emit("greater_equal", x, first), g.emit("less_equal", x, last))
    place = g.emit("divide", g.emit("subtract", x, first), g.constant(high - low, dtype))
    ids = cast(g, g.emit("multiply", place, g.constant(bins, dtype)), "int64")
    ids = g.emit("clip", ids, min=0, max=bins - 1)
    return g.emit("segment_sum", cast(g, inside, dtype), ids, num_segments=bins)


# Relax spellings


@relax("relax.scatter_elements")
def _relax_scatter(g: Builder, args: Any, attrs: Attrs) -> Any:
    axis = axis_of(attrs["axis"], len(args[0].tensor.shape))
    if attrs["reduction"] not in REDUCTIONS:
        raise NotImplementedError(f"a reduction by {attrs['reduction']!r}")
    ids = to_nonnegative(g, args[1], args[0].tensor.shape[axis], "scatter_elements")
    return write_elements(g, args[0], axis, ids, args[2], attrs["reduction"])


# ONNX spellings


_ONNX_REDUCTIONS = {"none": "update", "add": "add", "mul": "mul", "max": "max", "min": "min"}


def onnx_reduction(attrs: Attrs) -> str:
    """Return the reduction of an ONNX scatter."""
    return _ONNX_REDUCTIONS[attrs.get("reduction", "none")]


@onnx("ScatterElements", "Scatter")
def _onnx_scatter(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axis = axis_of(attrs.get("axis", 0), len(x[0].tensor.shape))
    ids = nonnegative_operand(g, x, 1, x[0].tensor.shape[axis], "ScatterElements")
    return write_elements(g, x[0], axis, ids, x[2], onnx_reduction(attrs))
