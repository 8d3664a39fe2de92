"""Row lookups: take (embedding) and open-mesh indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distir_relax.ir import Op, TensorType, Value
from distir_relax.layout import is_always
from distir_relax.ops.indexing.index_bounds import check_constant, check_range
from distir_relax.ops.indexing.segment_sum import sum_segments
from distir_relax.ops.table import (
    LOOK_UP,
    Attrs,
    Backward,
    Builder,
    Code,
    Element,
    Expand,
    Expansion,
    OnnxOperands,
    Order,
    QuantizedForm,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    axis_of,
    define,
    gradient_of,
    index_of,
    is_number,
    is_within,
    onnx,
    operands,
    parse_rule,
    reindexed,
    reindexed_number,
    relax,
    reshape_to,
    size_array,
)


def _infer_take(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    table, ids = types
    axis = attrs["axis"]
    if not 0 <= axis < len(table.shape) or "int" not in ids.dtype:
        raise ValueError(f"axis {axis} of {table} by integer numbers")
    return (TensorType((*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :]), table.dtype),)


def _looked_up(
    elements: Sequence[Element], shapes: Sequence[Sequence[int]], attrs: Attrs, shape: Sequence[int]
) -> Element | None:
    (table, ids), axis = shapes, attrs["axis"]
    if not is_number(elements[1]):
        return None
    row = reindexed_number(elements[1], [index_of(axis + dim) if n != 1 else 0 for dim, n in enumerate(ids)])
    if not is_within(row, 0, table[axis], shape):
        return None
    later = len(ids) - 1
    return reindexed(elements[0], [row if d == axis else index_of(d + later * (d > axis)) for d in range(len(table))])


def _take_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    # Booleans cannot be summed over devices.
    looked = "[axis]" if types[0].dtype == "bool" else "axis"
    rows = [looked if i == attrs["axis"] else f"d{i}" for i in range(len(types[0].shape))]
    ids = [f"i{i}" for i in range(len(types[1].shape))]
    axis = attrs["axis"]
    right = [*rows[:axis], *ids, *rows[axis + 1 :]]
    text = f"{' '.join(rows)}, {' '.join(ids)} -> {' '.join(right)}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape])


def split_lookup(name: str) -> Expand:
    """Return the split of the looked-up dim of op `name`: a device looks up its elements, with zeros for the others.

    The result is ``I[sum]``: summed over the devices it is the whole lookup.
    """

    def expand(x: Expansion) -> tuple[Value, ...]:
        data, ids = x.operands
        axis, dtype, ids_dtype = x.attrs["axis"], x.types[0].dtype, x.types[1].dtype
        rank = len(x.types[0].shape)
        if x.may_be_empty(data, axis):
            # A device without elements still needs one to look up; it is masked.
            data = x.emit("pad", data, low=(0,) * rank, high=tuple(int(d == axis) for d in range(rank)), value=0)
        row, mine = x.local_rows(ids, ids_dtype)
        zero = x.emit("constant", value=0, dtype=ids_dtype)
        values = x.emit(name, data, x.emit("where", mine, row, zero), axis=axis)
        if name == "take" and rank - axis > 1:
            mine = x.emit("reshape", mine, shape=(*x.shape(mine), *(1,) * (rank - axis - 1)))
        blank = x.emit("constant", value=0.0 if "float" in dtype else 0, dtype=dtype)
        return (x.emit("where", mine, values, blank),)

    return expand


def _take_gradient(b: Backward) -> Value:
    """Return for each row the sum of the gradients of its lookups; row `padding`, if given, has none."""
    table = b.x().tensor.shape
    axis, count = b.attrs["axis"], b.x(1).tensor.elements
    grad, ids = reshape_to(b.g, b.grad, (*table[:axis], count, *table[axis + 1 :])), reshape_to(b.g, b.x(1), (count,))
    if "padding" in b.attrs:
        padding = b.emit("equal", ids, b.g.constant(b.attrs["padding"], ids.tensor.dtype))
        padding = reshape_to(b.g, padding, (count, *(1,) * len(table[axis + 1 :])))
        grad = b.emit("where", padding, b.number(0.0), grad)
    return sum_segments(b.g, grad, axis, ids, table[axis])


def _quantized_rows(g: Builder, op: Op, weight: Sequence[Value]) -> Value:
    rows = [g.emit("take", part, *op.operands[1:], **op.attrs) for part in weight]
    is_grouped = len(weight[0].tensor.shape) == 3
    result: Value = g.emit("dequantize", *rows, grouped=is_grouped, dtype=op.results[0].tensor.dtype)
    return result


define(
    "take",
    Semantics(
        infer=_infer_take,
        torch=lambda attrs: f"{{0}}[{':, ' * attrs['axis']}{{1}}]",
        linear=(operands(0),),
        element=_looked_up,
    ),
    Split(
        _take_rule,
        expand={"axis": split_lookup("take")},
        positional=frozenset({"axis"}),
        indices=operands(1),
        order=Order(looks_up=True),
    ),
    cost=LOOK_UP,
    code=Code(relax='R.take({0}, {1}, {axis}, "clip")'),
    gradient=gradient_of(_take_gradient),
    quantized=QuantizedForm(
        0,
        _quantized_rows,
        is_product=False,
        applies=lambda op: op.attrs["axis"] == 0 and len(op.operands[0].tensor.shape) == 2,
    ),
    # A tensor without dims as index gives a view.
    traits={Trait.MOVES, Trait.MAY_SHARE},
)


# ATen spellings


@aten("embedding.default")
def _embedding(
    g: Builder, table: Value, ids: Value, padding: int = -1, scale_by_count: bool = False, sparse: bool = False
) -> Any:
    """Row `padding`, if any, is read like others, without a gradient. Gradients in a program are never `sparse`."""
    if scale_by_count and g.training:
        raise NotImplementedError("gradients that are scaled by how often a row is looked up")
    ids = check_range(g, ids, table.tensor.shape[0], "embedding")
    return g.emit("take", table, ids, axis=0, **({"padding": padding} if padding >= 0 else {}))


@aten("index_select.default")
def _index_select(g: Builder, x: Value, dim: int, ids: Value) -> Any:
    flat, shape = reshape_to(g, ids, (ids.tensor.elements,)), x.tensor.shape
    y = x if shape else reshape_to(g, x, (1,))
    axis = axis_of(dim, len(y.tensor.shape))
    rows = g.emit("take", y, check_range(g, flat, y.tensor.shape[axis], "index_select"), axis=axis)
    return rows if shape else reshape_to(g, rows, ())


@aten("index.Tensor")
def index(g: Builder, x: Value, indices: list[Any]) -> Any:
    """Index by tensors that broadcast together.

    Broadcasted masks use an open mesh: each index varies along one dim of the result, in the order of the dims it
    indexes. Each is then a separate `take`, which splits in more ways than the general op.
    """
    indices = [part for ids in indices for part in _index_tensors(g, ids)]
    used = [(dim, ids) for dim, ids in enumerate(indices) if ids is not None]
    used = [(dim, to_nonnegative(g, ids, x.tensor.shape[dim], "index")) for dim, ids in used]
    return _take_mesh(g, x, used) if _is_open_mesh(used) else _take_points(g, x, used)


def _index_tensors(g: Builder, index: Value | None) -> list[Any]:
    """Return an index as integer tensors, one per indexed dim: a constant mask becomes its positions."""
    if index is None or index.tensor.dtype != "bool":
        return [index]
    mask = g.constants.get(index.name)
    if mask is None:
        raise NotImplementedError("indexing by a mask, whose result has a shape that depends on data")
    return [g.array(places, "places") for places in mask.nonzero(as_tuple=True)]


def to_nonnegative(g: Builder, index: Value, size: int, user: str) -> Any:
    """Return indices of `user` into a dim of `size` as nonnegative indices.

    A split dim is looked up by position, so a negative index would belong to no device.
    """
    return wrap_negative(g, check_range(g, index, size, user, from_end=True), size)


def wrap_negative(g: Builder, index: Value, size: int) -> Any:
    """Add `size` to negative indices."""
    data = g.constants.get(index.name)
    if data is not None and (not data.numel() or int(data.min()) >= 0):
        return index
    dtype = index.tensor.dtype
    below = g.emit("less", index, g.constant(0, dtype))
    return g.emit("where", below, g.emit("add", index, g.constant(size, dtype)), index)


def _varying(index: Value, rank: int) -> list[int]:
    lead = rank - len(index.tensor.shape)
    return [i + lead for i, n in enumerate(index.tensor.shape) if n != 1]


def _is_open_mesh(used: list[tuple[int, Any]]) -> bool:
    rank = max(len(index.tensor.shape) for _, index in used)
    homes = [_varying(index, rank) for _, index in used]
    flat = [home for wide in homes for home in wide]
    adjacent = all(dim == used[0][0] + i for i, (dim, _) in enumerate(used))
    return adjacent and all(len(wide) <= 1 for wide in homes) and flat == sorted(set(flat))


def _take_mesh(g: Builder, x: Value, used: list[tuple[int, Any]]) -> Any:
    first = used[0][0]
    rank = max(len(index.tensor.shape) for _, index in used)
    spread = [1] * rank
    dims = 0
    for _, index in used:
        wide = _varying(index, rank)
        axis = first + dims
        if _counts_up(g, index, x.tensor.shape[axis]):
            x = x if wide else reshape_to(g, x, (*x.tensor.shape[:axis], *x.tensor.shape[axis + 1 :]))
        else:
            x = g.emit("take", x, reshape_to(g, index, (index.tensor.elements,) if wide else ()), axis=axis)
        if wide:
            spread[wide[0]] = x.tensor.shape[axis]
            dims += 1
    return reshape_to(g, x, (*x.tensor.shape[:first], *spread, *x.tensor.shape[first + dims :]))


def _counts_up(g: Builder, index: Value, size: int) -> bool:
    """Return whether a constant index is 0, 1, …, size - 1, so that the lookup is the identity."""
    data = g.constants.get(index.name)
    return data is not None and data.flatten().tolist() == list(range(size))


def _take_points(g: Builder, x: Value, used: list[tuple[int, Any]]) -> Any:
    dims = [dim for dim, _ in used]
    rest = [i for i in range(len(x.tensor.shape)) if i not in dims]
    order = (*dims, *rest)
    if order != tuple(range(len(order))):
        x = g.emit("permute_dims", x, axes=order)
    y = g.emit("index_tensor", x, *[index for _, index in used], count=len(used))
    # The indexed dims replace the first one if all are adjacent, and come first otherwise.
    rank = len(y.tensor.shape) - len(rest)
    home = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    back = (*range(rank, rank + home), *range(rank), *range(rank + home, rank + len(rest)))
    return y if back == tuple(range(len(back))) else g.emit("permute_dims", y, axes=back)


# Relax spellings


@relax("relax.take")
def _relax_take(g: Builder, args: Any, attrs: Attrs) -> Any:
    x, ids = args
    axis, mode = (attrs["axis"] or 0) % len(x.tensor.shape), attrs["mode"]
    size = x.tensor.shape[axis]
    if mode == "nan":
        raise NotImplementedError("a lookup that returns NaN for indices out of range")
    if mode == "clip":
        ids = g.aten("clamp.default", ids, 0, size - 1)
    elif mode == "wrap":
        ids = g.emit("mod", ids, g.constant(size, ids.tensor.dtype))
    return g.emit("take", x, ids if mode in ("clip", "wrap") else check_range(g, ids, size, "take"), axis=axis)


# ONNX spellings


def nonnegative_operand(g: Builder, x: Any, index: int, size: int, user: str) -> Any:
    """Return the indices of `user`, operand `index` of an ONNX node, into a dim of `size`, as nonnegative indices."""
    numbers = x.constant_numbers(index)
    if numbers is not None:
        check_constant(g, numbers, size, user, from_end=True)
        data = x.array(index)
        positions = np.array([axis_of(n, size) for n in numbers], dtype=object).reshape(data.shape)
        return x.constant(size_array(positions, x.dtype(index)))
    return to_nonnegative(g, x[index], size, user)


@onnx("Gather")
def _onnx_gather(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    shape = x[0].tensor.shape
    axis = attrs.get("axis", 0) % len(shape)
    numbers = x.constant_numbers(1)
    if numbers is not None and numbers:
        check_constant(g, numbers, shape[axis], "Gather", from_end=True)
        data = x.array(1)
        positions = [axis_of(n, shape[axis]) for n in numbers]
        first = positions[0]
        run = [first + i for i in range(len(numbers))]
        if data.ndim <= 1 and positions == run and is_always(run[-1], "<", shape[axis]) is True:
            # Adjacent rows are a slice, which needs no lookup.
            y = x[0]
            if len(run) != shape[axis]:
                y = g.emit("strided_slice", y, axes=(axis,), begin=(first,), end=(run[-1] + 1,), strides=(1,))
            return y if data.ndim else reshape_to(g, y, (*shape[:axis], *shape[axis + 1 :]))
    return g.emit("take", x[0], nonnegative_operand(g, x, 1, shape[axis], "Gather"), axis=axis)
