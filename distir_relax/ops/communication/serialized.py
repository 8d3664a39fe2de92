"""Serialized collectives: emulation with ops of the table where one device computes all parts in turn.

Each function takes the operand of every index along the axis (none for an op without operands) and the attributes of
each, and returns the result of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Attrs, Builder

Rows = Sequence[Attrs]

_REDUCTIONS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}


def all_reduce(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``all_reduce``: term by term, so that only one term is live at a time."""
    return [_sum(g, parts, rows[0]["op"])] * len(rows)


def all_gather(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``all_gather``."""
    return [_concat(g, parts, rows[0]["dim"])] * len(rows)


def reduce_scatter(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``reduce_scatter``."""
    total = _sum(g, parts, rows[0]["op"])
    return _split(g, total, rows[0]["dim"], rows[0]["sizes"])


def shard(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``shard``: each index takes its own part. `rows` may be those of the first indices alone."""
    dim, sizes = rows[0]["dim"], rows[0]["sizes"][: len(rows)]
    ends = list(accumulate(sizes))
    return [_slice(g, x, dim, end - n, end) for x, n, end in zip(parts, sizes, ends, strict=True)]


def shard_start(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``shard_start``. `rows` may be those of the first indices alone."""
    sizes = rows[0]["sizes"][: len(rows)]
    return [g.constant(end - n, rows[0]["dtype"]) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def all_to_all(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``all_to_all``."""
    attrs = rows[0]
    pieces = [_split(g, x, attrs["split_dim"], attrs["split_sizes"]) for x in parts]
    return [_concat(g, [row[i] for row in pieces], attrs["concat_dim"]) for i in range(len(rows))]


def resplit(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``resplit``."""
    dim = rows[0]["dim"]
    pieces = [_split(g, x, dim, sizes) for x, sizes in zip(parts, rows[0]["pieces"], strict=True)]
    return [_concat(g, [row[i] for row in pieces], dim) for i in range(len(rows))]


def slices(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``slices``."""
    return [
        _concat(g, [_slice(g, x, row["dim"], a, b) for a, b in row["intervals"]], row["dim"])
        for x, row in zip(parts, rows, strict=True)
    ]


def _sum(g: Builder, parts: Sequence[Value], op: str) -> Value:
    total = parts[0]
    for number, part in enumerate(parts[1:]):
        total = g.again(g.ops[-1], total, part) if number else g.emit(_REDUCTIONS[op], total, part)
    if op == "mean":
        total = g.emit("divide", total, g.constant(float(len(parts)), total.tensor.dtype))
    return total


def _concat(g: Builder, parts: Sequence[Value], dim: int) -> Value:
    nonempty: Any = [x for x in parts if x.tensor.shape[dim]] or parts[:1]
    joined: Value = nonempty[0] if len(nonempty) == 1 else g.emit("concat", *nonempty, axis=dim)
    return joined


def _split(g: Builder, x: Value, dim: int, sizes: Sequence[int]) -> list[Value]:
    return [_slice(g, x, dim, end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def _slice(g: Builder, x: Value, dim: int, start: int, stop: int) -> Value:
    if (start, stop) == (0, x.tensor.shape[dim]):
        return x
    result: Value = g.emit("strided_slice", x, axes=(dim,), begin=(start,), end=(stop,), strides=(1,))
    return result
