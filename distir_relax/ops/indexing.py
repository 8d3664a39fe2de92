"""Looking up rows by number: take (embedding) and open-mesh indexing."""

from __future__ import annotations

from typing import Any

import numpy as np

from distir_relax.ir import TensorType, Value
from distir_relax.ops.registry import Attrs, Expansion, Types, aten, define, onnx_spelling, operands, relax_spelling
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import reshape_to


def _infer_take(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    table, ids = types
    axis = attrs["axis"]
    if not 0 <= axis < len(table.shape) or "int" not in ids.dtype:
        raise ValueError(f"axis {axis} of {table} by integer numbers")
    return (TensorType((*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :]), table.dtype),)


def _take_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rows = ["axis" if i == attrs["axis"] else f"d{i}" for i in range(len(types[0].shape))]
    ids = [f"i{i}" for i in range(len(types[1].shape))]
    axis = attrs["axis"]
    right = [*rows[:axis], *ids, *rows[axis + 1 :]]
    text = f"{' '.join(rows)}, {' '.join(ids)} -> {' '.join(right)}"
    return parse_rule(text, [t.shape for t in types], [results[0].shape])


def _torch_take(attrs: Attrs) -> str:
    return f"{{0}}[{':, ' * attrs['axis']}{{1}}]"


def _split_take(x: Expansion) -> tuple[Value, ...]:
    """Rows of a split table: each device looks up the rows it holds, and gives zeros for the others.

    Summed over the devices this is the whole look-up: the result is ``I[sum]``.
    """
    table, ids = x.operands
    axis, rows = x.attrs["axis"], x.types[0].dtype
    rank = len(x.types[0].shape)
    if x.may_be_empty(table, axis):
        # A device without rows still looks something up, and masks it.
        table = x.emit("pad", table, low=(0,) * rank, high=tuple(int(d == axis) for d in range(rank)), value=0)
    row, mine = x.local_rows(ids, x.types[1].dtype)
    zero = x.emit("constant", value=0, dtype=x.types[1].dtype)
    found = x.emit("take", table, x.emit("where", mine, row, zero), axis=axis)
    if rank - axis > 1:
        mine = x.emit("reshape", mine, shape=(*x.shape(mine), *(1,) * (rank - axis - 1)))
    blank = x.emit("constant", value=0.0 if "float" in rows else 0, dtype=rows)
    return (x.emit("where", mine, found, blank),)


define(
    "take",
    infer=_infer_take,
    rule=_take_rule,
    torch=_torch_take,
    relax='R.take({0}, {1}, {axis}, "clip")',
    linear=(operands(0),),
    expand={"axis": _split_take},
    positional=frozenset({"axis"}),
    indices=operands(1),
    flops=lambda types, attrs, results: 0.0,
)


@aten("embedding.default")
def _embedding(g: Any, table: Any, ids: Any, *options: Any) -> Any:
    return g.emit("take", table, ids, axis=0)


@aten("index_select.default")
def _index_select(g: Any, x: Any, dim: int, ids: Any) -> Any:
    return g.emit("take", x, ids, axis=dim % len(x.type.shape))


@aten("index.Tensor")
def index(g: Any, x: Any, indices: list[Any]) -> Any:
    """Indexing by tensors that broadcast together.

    Masks built by broadcasting ask for an open mesh: each index varies along one dim of the result, in the order of the
    dims it indexes. Each is then a `take` of its own, which splits further than the general op.
    """
    used = [(dim, ids) for dim, ids in enumerate(indices) if ids is not None]
    if any(ids.type.dtype == "bool" for _, ids in used):
        raise NotImplementedError("indexing by a mask, whose result has a shape that depends on data")
    used = [(dim, from_front(g, ids, x.type.shape[dim])) for dim, ids in used]
    return _take_mesh(g, x, used) if _is_open_mesh(used) else _take_points(g, x, used)


def from_front(g: Any, index: Any, size: int) -> Any:
    """Indices into a dim of `size`, those counted from its end counted from the front.

    A split dim is looked up by position, where a number below zero would be nobody's.
    """
    data = g.known.get(index.name)
    if data is not None and (not data.numel() or int(data.min()) >= 0):
        return index
    dtype = index.type.dtype
    below = g.emit("less", index, g.constant(0, dtype))
    return g.emit("where", below, g.emit("add", index, g.constant(size, dtype)), index)


def _varying(index: Any, rank: int) -> list[int]:
    lead = rank - len(index.type.shape)
    return [i + lead for i, n in enumerate(index.type.shape) if n != 1]


def _is_open_mesh(used: list[tuple[int, Any]]) -> bool:
    rank = max(len(index.type.shape) for _, index in used)
    homes = [_varying(index, rank) for _, index in used]
    flat = [home for wide in homes for home in wide]
    adjacent = all(dim == used[0][0] + i for i, (dim, _) in enumerate(used))
    return adjacent and all(len(wide) <= 1 for wide in homes) and flat == sorted(set(flat))


def _take_mesh(g: Any, x: Any, used: list[tuple[int, Any]]) -> Any:
    first = used[0][0]
    rank = max(len(index.type.shape) for _, index in used)
    spread = [1] * rank
    taken = 0
    for _, index in used:
        wide = _varying(index, rank)
        axis = first + taken
        if _counts_up(g, index, x.type.shape[axis]):
            x = x if wide else reshape_to(g, x, (*x.type.shape[:axis], *x.type.shape[axis + 1 :]))
        else:
            x = g.emit("take", x, reshape_to(g, index, (index.type.elements,) if wide else ()), axis=axis)
        if wide:
            spread[wide[0]] = x.type.shape[axis]
            taken += 1
    return reshape_to(g, x, (*x.type.shape[:first], *spread, *x.type.shape[first + taken :]))


def _counts_up(g: Any, index: Any, size: int) -> bool:
    """Whether a constant index is 0, 1, …, size - 1, which takes all as it is."""
    data = g.known.get(index.name)
    return data is not None and data.flatten().tolist() == list(range(size))


def _take_points(g: Any, x: Any, used: list[tuple[int, Any]]) -> Any:
    dims = [dim for dim, _ in used]
    rest = [i for i in range(len(x.type.shape)) if i not in dims]
    order = (*dims, *rest)
    if order != tuple(range(len(order))):
        x = g.emit("permute_dims", x, axes=order)
    y = g.emit("index_tensor", x, *[index for _, index in used], count=len(used))
    # The picked dims stand where the first index was when all are neighbours, and first otherwise.
    rank = len(y.type.shape) - len(rest)
    home = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    back = (*range(rank, rank + home), *range(rank), *range(rank + home, rank + len(rest)))
    return y if back == tuple(range(len(back))) else g.emit("permute_dims", y, axes=back)


@relax_spelling("relax.take")
def _relax_take(g: Any, args: Any, attrs: Any) -> Any:
    return g.emit("take", *args, axis=(attrs["axis"] or 0) % len(args[0].type.shape))


# ONNX spellings


def counted_from_front(g: Any, x: Any, index: int, size: int) -> Any:
    """The indices that operand `index` of an ONNX node holds, into a dim of `size`: ONNX lets them count from the end."""
    numbers = x.known_numbers(index)
    if numbers is not None:
        data = x.array(index)
        return x.constant(np.where(data < 0, data + size, data).astype(data.dtype))
    return from_front(g, x[index], size)


@onnx_spelling("Gather")
def _onnx_gather(g: Any, x: Any, attrs: Any) -> Any:
    shape = x[0].type.shape
    axis = attrs.get("axis", 0) % len(shape)
    numbers = x.known_numbers(1)
    if numbers is not None and numbers:
        data = x.array(1)
        first = numbers[0] % shape[axis]
        run = list(range(first, first + len(numbers)))
        if data.ndim <= 1 and [n % shape[axis] for n in numbers] == run:
            # Neighbours are a slice, which needs no look-up.
            y = x[0]
            if len(run) < shape[axis]:
                y = g.emit("strided_slice", y, axes=(axis,), begin=(first,), end=(run[-1] + 1,), strides=(1,))
            return y if data.ndim else reshape_to(g, y, (*shape[:axis], *shape[axis + 1 :]))
    return g.emit("take", x[0], counted_from_front(g, x, 1, shape[axis]), axis=axis)
