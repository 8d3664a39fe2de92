"""Looking up rows by number: take (embedding) and open-mesh indexing."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.registry import Attrs, Expansion, Types, aten, define, operands
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
    held = x.shape(table)[axis]
    if 0 in x.sizes:
        # A device without rows still looks something up, and masks it.
        table = x.emit("pad", table, low=(0,) * rank, high=tuple(int(d == axis) for d in range(rank)), value=0)
    start = x.emit("shard_start", axis=x.axis, sizes=x.sizes, dtype=x.types[1].dtype)
    row = x.emit("subtract", ids, start)
    zero = x.emit("constant", value=0, dtype=x.types[1].dtype)
    end = x.emit("constant", value=held, dtype=x.types[1].dtype)
    mine = x.emit("logical_and", x.emit("greater_equal", row, zero), x.emit("less", row, end))
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
    flops=lambda types, attrs, results: 0.0,
)


@aten("embedding.default")
def _embedding(g: Any, table: Any, ids: Any, *options: Any) -> Any:
    return g.emit("take", table, ids, axis=0)


@aten("index_select.default")
def _index_select(g: Any, x: Any, dim: int, ids: Any) -> Any:
    return g.emit("take", x, ids, axis=dim % len(x.type.shape))


@aten("index.Tensor")
def _index(g: Any, x: Any, indices: list[Any]) -> Any:
    """Indexing by an open mesh: each index varies along one dim of the result, in the order of the dims it indexes.

    That is what masks built by broadcasting ask for; each index is then a `take` of its own.
    """
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    first = used[0][0]
    rank = max(len(index.type.shape) for _, index in used)
    taken = 0
    homes: list[int] = []
    for position, (dim, index) in enumerate(used):
        lead = rank - len(index.type.shape)
        wide = [i + lead for i, n in enumerate(index.type.shape) if n != 1]
        if dim != first + position or len(wide) > 1 or (wide and homes and wide[0] <= max(homes)):
            raise NotImplementedError("index tensors that are not an open mesh (one varying dim each, in order)")
        homes += wide
        axis = first + taken
        if wide:
            x = g.emit("take", x, reshape_to(g, index, (index.type.elements,)), axis=axis)
            taken += 1
        else:
            x = g.emit("take", x, reshape_to(g, index, ()), axis=axis)
    shape = x.type.shape
    spread = [1] * rank
    for home, size in zip(homes, shape[first : first + taken], strict=True):
        spread[home] = size
    return reshape_to(g, x, (*shape[:first], *spread, *shape[first + taken :]))
