"""Segment sums: ``result[n]`` is the sum of the rows of data whose index is n.

If the rows are split, each device sums its own rows: the result is ``I[sum]``. If the result is split, each device
sums the rows of its own part; all others go to an extra row that is then cut off.
"""

from __future__ import annotations

from distir_relax.ir import PerRank, Size, TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    Expansion,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    flops_per_operand,
    gradient_of,
    operands,
    parse_rule,
)


def sum_segments(g: Builder, rows: Value, axis: int, ids: Value, count: int) -> Value:
    """Return `rows` with dim `axis` of `count` elements, each the sum of the rows along it with that index in `ids`."""
    rank = len(rows.tensor.shape)
    order = (axis, *(d for d in range(rank) if d != axis))
    rows = rows if axis == 0 else g.emit("permute_dims", rows, axes=order)
    total: Value = g.emit("segment_sum", rows, ids, num_segments=count)
    return total if axis == 0 else g.emit("permute_dims", total, axes=tuple(map(order.index, range(rank))))


def drop_extra_row(x: Expansion, value: Value, axis: int) -> Value:
    """Return `value` without the extra row of elements that belong to other devices."""
    cut: Value = x.emit("strided_slice", value, axes=(axis,), begin=(0,), end=(x.local_size,), strides=(1,))
    return cut


def local_row_ids(x: Expansion, ids: Value, dtype: str) -> Value:
    """Return indices relative to the device's part; all others are the index of the extra row after it."""
    row, mine = x.local_rows(ids, dtype)
    end = x.emit("constant", value=x.local_size, dtype=dtype)
    rows: Value = x.emit("where", mine, row, end)
    return rows


def _one_more(size: Size) -> Size:
    return PerRank(tuple(n + 1 for n in size.values)) if isinstance(size, PerRank) else size + 1


def _infer_segments(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    data, ids = types
    if not data.shape or ids.shape != data.shape[:1] or "int" not in ids.dtype:
        raise ValueError(f"expected an integer id for each of the rows of {data.shape}")
    return (TensorType((attrs["num_segments"], *data.shape[1:]), data.dtype),)


def _segment_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rest = " ".join(f"d{i}" for i in range(1, len(types[0].shape)))
    return parse_rule(f"row {rest}, row -> segment {rest}", [t.shape for t in types], [results[0].shape])


def _split_segments(x: Expansion) -> tuple[Value, ...]:
    data, ids = x.operands
    rows = local_row_ids(x, ids, x.types[1].dtype)
    return (drop_extra_row(x, x.emit("segment_sum", data, rows, num_segments=_one_more(x.local_size)), 0),)


define(
    "segment_sum",
    Semantics(
        infer=_infer_segments,
        torch="{0}.new_zeros(({num_segments}, *{0}.shape[1:])).index_add_(0, {1}, {0})",
        linear=(operands(0),),
    ),
    Split(_segment_rule, expand={"segment": _split_segments}, positional=frozenset({"segment"}), indices=operands(1)),
    cost=Cost(flops=flops_per_operand()),
    code=Code(
        relax="R.scatter_nd(R.zeros(({num_segments}, *list({0}.ty.shape)[1:]), {0}.ty.dtype), "
        'R.expand_dims({1}, 1), {0}, "add")'
    ),
    gradient=gradient_of(lambda b: b.emit("take", b.grad, b.x(1), axis=0)),
    traits={Trait.ZERO_IF_EMPTY},
)
