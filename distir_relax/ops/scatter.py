"""Writing elements to positions that data give: scattering, sums by number, one-hot codes.

Where the dim that is written to is split, each device writes what falls into its part; what falls elsewhere goes to a
row of its own that is then cut off. Sums by number (`segment_sum`) are also split along what is summed: the result is
``I[sum]`` then. An accumulating scatter of whole rows is such a sum, added to the data.

The spellings are in `distir_relax.ops.scatter_calls` and `distir_relax.ops.points`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import PerRank, Size, TensorType, Value
from distir_relax.ops.indexing import from_front
from distir_relax.ops.pointwise import broadcast, promote
from distir_relax.ops.registry import Attrs, Expansion, Types, define, operands
from distir_relax.ops.rule import BLOCKED, Factor, Rule, parse_rule
from distir_relax.ops.shape import axis_of, reshape_to

# Our names (Relax's) for how a written element joins what was there, and torch's.
REDUCTIONS = {"update": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _one_more(size: Size) -> Size:
    return PerRank(tuple(n + 1 for n in size.values)) if isinstance(size, PerRank) else size + 1


def _cut_off(x: Expansion, value: Value, axis: int) -> Value:
    """`value` without the row that took what is not the device's."""
    cut: Value = x.emit("strided_slice", value, axes=(axis,), begin=(0,), end=(x.held,), strides=(1,))
    return cut


def _my_rows(x: Expansion, ids: Value, dtype: str) -> Value:
    """Numbers within the part that a device holds; all others become the number of the row behind it."""
    row, mine = x.local_rows(ids, dtype)
    end = x.emit("constant", value=x.held, dtype=dtype)
    rows: Value = x.emit("where", mine, row, end)
    return rows


# scatter_elements: result[index[i][j]][j] = updates[i][j] for axis 0, the rest as in data


def _infer_scatter(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, index, updates = types
    axis = attrs["axis"]
    if attrs["reduction"] not in REDUCTIONS:
        raise ValueError(f"a reduction of {', '.join(REDUCTIONS)}")
    if not len(data.shape) == len(index.shape) > axis >= 0 or "int" not in index.dtype:
        raise ValueError(f"an integer index of {len(data.shape)} dims, and an axis among them")
    if index.shape != updates.shape or updates.dtype != data.dtype:
        raise ValueError(f"updates of the index's shape {index.shape} and the data's dtype {data.dtype}")
    if any(n != m for d, (n, m) in enumerate(zip(data.shape, index.shape, strict=True)) if d != axis):
        raise ValueError(f"an index of the data's shape {data.shape} but along dim {axis}, found {index.shape}")
    return (data,)


def _scatter_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    count, axis = len(types[0].shape), attrs["axis"]
    whole = " ".join("axis" if d == axis else f"d{d}" for d in range(count))
    written = whole.replace("axis", "[written]")
    return parse_rule(f"{whole}, {written}, {written} -> {whole}", [t.shape for t in types], [results[0].shape])


def _split_scatter(x: Expansion) -> tuple[Value, ...]:
    data, index, updates = x.operands
    axis, rank = x.attrs["axis"], len(x.types[0].shape)
    more = tuple(int(d == axis) for d in range(rank))
    wide = x.emit("pad", data, low=(0,) * rank, high=more, value=0)
    rows = _my_rows(x, index, x.types[1].dtype)
    return (_cut_off(x, x.emit("scatter_elements", wide, rows, updates, **x.attrs), axis),)


def _torch_scatter(attrs: Attrs) -> str:
    how = REDUCTIONS[attrs["reduction"]]
    if not how:
        return "{0}.scatter({axis}, {1}.long(), {2})"
    return f'{{0}}.scatter_reduce({{axis}}, {{1}}.long(), {{2}}, "{how}")'


define(
    "scatter_elements",
    infer=_infer_scatter,
    rule=_scatter_rule,
    torch=_torch_scatter,
    relax="R.scatter_elements({0}, {1}, {2}, {axis}, {reduction})",
    linear=lambda attrs: (operands(0, 2),) if attrs["reduction"] in ("update", "add") else (),
    expand={"axis": _split_scatter},
    positional=frozenset({"axis"}),
    indices=operands(1),
    flops=lambda types, attrs, results: float(types[2].elements),
)


# segment_sum: result[n] is the sum of the rows of data whose number is n


def _infer_segments(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, ids = types
    if not data.shape or ids.shape != data.shape[:1] or "int" not in ids.dtype:
        raise ValueError(f"an integer number for each of the rows of {data.shape}")
    return (TensorType((attrs["num_segments"], *data.shape[1:]), data.dtype),)


def _segment_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rest = " ".join(f"d{i}" for i in range(1, len(types[0].shape)))
    return parse_rule(f"row {rest}, row -> segment {rest}", [t.shape for t in types], [results[0].shape])


def _split_segments(x: Expansion) -> tuple[Value, ...]:
    data, ids = x.operands
    rows = _my_rows(x, ids, x.types[1].dtype)
    return (_cut_off(x, x.emit("segment_sum", data, rows, num_segments=_one_more(x.held)), 0),)


define(
    "segment_sum",
    infer=_infer_segments,
    rule=_segment_rule,
    torch="{0}.new_zeros(({num_segments}, *{0}.shape[1:])).index_add(0, {1}, {0})",
    relax=(
        'R.scatter_nd(R.zeros(({num_segments}, *list({0}.ty.shape)[1:]), {0}.ty.dtype), R.expand_dims({1}, 1), {0}, "add")'
    ),
    linear=(operands(0),),
    expand={"segment": _split_segments},
    positional=frozenset({"segment"}),
    indices=operands(1),
    zero_if_empty=True,
    flops=lambda types, attrs, results: float(types[0].elements),
)


# arange: the numbers start, start + step, …


def _infer_arange(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if not attrs["step"]:
        raise ValueError("a step other than 0")
    count = max(0, math.ceil((attrs["end"] - attrs["start"]) / attrs["step"]))
    return (TensorType((count,), attrs["dtype"]),)


def _arange_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    (count,) = results[0].shape
    return Rule((Factor("n", count, BLOCKED),), (), (((0,),),)) if count != 1 else Rule((), (), (((),),))


define(
    "arange",
    infer=_infer_arange,
    rule=_arange_rule,
    torch="torch.arange({start}, {end}, {step}, dtype=torch.{dtype!s})",
    relax="R.arange({start}, {end}, {step}, {dtype})",
    flops=lambda types, attrs, results: 0.0,
)


# Forms that the entries do not have


def spread_to(g: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to `shape`; itself when it has that shape already."""
    return x if x.type.shape == tuple(shape) else g.emit("broadcast_to", x, shape=tuple(shape))


def write_rows(g: Any, x: Any, axis: int, ids: Any, rows: Any, reduction: str) -> Any:
    """`x` with `rows` written to, or joined with, those of its dim `axis` that `ids` (a vector) names."""
    rank = len(x.type.shape)
    if reduction == "add":
        order = (axis, *(d for d in range(rank) if d != axis))
        back = tuple(order.index(d) for d in range(rank))
        rows = rows if axis == 0 else g.emit("permute_dims", rows, axes=order)
        total = g.emit("segment_sum", rows, ids, num_segments=x.type.shape[axis])
        return g.emit("add", x, total if axis == 0 else g.emit("permute_dims", total, axes=back))
    ids = reshape_to(g, ids, tuple(ids.type.elements if d == axis else 1 for d in range(rank)))
    ids = spread_to(g, ids, rows.type.shape)
    return g.emit("scatter_elements", x, ids, rows, axis=axis, reduction=reduction)


def write_points(g: Any, x: Any, dims: Sequence[int], indices: Sequence[Any], values: Any, reduction: str) -> Any:
    """`x` with `values` written to, or joined with, the points that `indices` name in its dims `dims`.

    The indices broadcast to one shape. In `values`, which broadcast too, it stands where the first indexed dim was
    when the dims are neighbours, and first otherwise.
    """
    rest = [d for d in range(len(x.type.shape)) if d not in dims]
    sizes, others = [x.type.shape[d] for d in dims], tuple(x.type.shape[d] for d in rest)
    picked = broadcast([ids.type for ids in indices])
    count, home = math.prod(picked), dims[0] if _adjacent(dims) else 0
    values = spread_to(g, values, (*others[:home], *picked, *others[home:]))
    if home and picked:
        lead = range(home, home + len(picked))
        values = g.emit(
            "permute_dims", values, axes=(*lead, *range(home), *range(lead.stop, lead.stop - home + len(others)))
        )
    rows = reshape_to(g, values, (count, *others))
    order = (*dims, *rest)
    moved = order != tuple(range(len(order)))
    y = g.emit("permute_dims", x, axes=order) if moved else x
    flat = reshape_to(g, spread_to(g, one_number(g, indices, sizes), picked), (count,))
    written = write_rows(g, reshape_to(g, y, (math.prod(sizes), *others)), 0, flat, rows, reduction)
    written = reshape_to(g, written, y.type.shape)
    return g.emit("permute_dims", written, axes=tuple(map(order.index, range(len(order))))) if moved else written


def _adjacent(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[-1] + 1))


def one_number(g: Any, indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The indices of dims of `sizes` as those of one dim that holds them all."""
    indices = [from_front(g, ids, size) for ids, size in zip(indices, sizes, strict=True)]
    flat = indices[0]
    for ids, size in zip(indices[1:], sizes[1:], strict=True):
        scaled = g.emit("multiply", flat, g.constant(size, flat.type.dtype))
        flat = g.emit("add", *promote(g, scaled, ids))
    return flat


def write_elements(g: Any, x: Any, axis: int, ids: Any, updates: Any, reduction: str) -> Any:
    """``x[ids[i][j]][j] = updates[i][j]`` for axis 0, or joined with what is there.

    An index that covers but the beginning of the other dims names points of all of them.
    """
    sizes, shape = x.type.shape, ids.type.shape
    if all(n == m for d, (n, m) in enumerate(zip(sizes, shape, strict=True)) if d != axis):
        return g.emit("scatter_elements", x, ids, updates, axis=axis, reduction=reduction)
    indices = []
    for d, count in enumerate(shape):
        places = g.emit("arange", start=0, end=count, step=1, dtype=ids.type.dtype)
        indices.append(
            ids if d == axis else reshape_to(g, places, tuple(count if i == d else 1 for i in range(len(shape))))
        )
    return write_points(g, x, range(len(sizes)), indices, updates, reduction)


def one_hot(g: Any, ids: Any, depth: int, axis: int, on: Any, off: Any) -> Any:
    """`on` where the new dim `axis` of `depth` elements has the number in `ids`, `off` elsewhere."""
    shape, axis = ids.type.shape, axis_of(axis, len(ids.type.shape) + 1)
    classes = g.emit("arange", start=0, end=depth, step=1, dtype=ids.type.dtype)
    classes = reshape_to(g, classes, tuple(depth if d == axis else 1 for d in range(len(shape) + 1)))
    return g.emit("where", g.emit("equal", reshape_to(g, ids, (*shape[:axis], 1, *shape[axis:])), classes), on, off)
