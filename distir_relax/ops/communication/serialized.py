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

_JOINED_BY = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}


def reduced(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``all_reduce``: term by term, so that only one term is live at a time."""
    return [_sum(g, parts, rows[0]["op"])] * len(rows)


def gathered(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``all_gather``."""
    return [_joined(g, parts, rows[0]["dim"])] * len(rows)


def reduced_in_parts(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``reduce_scatter``."""
    whole = _sum(g, parts, rows[0]["op"])
    return _taken(g, whole, rows[0]["dim"], rows[0]["sizes"])


def own_parts(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``shard``: each index takes its own part."""
    dim, sizes = rows[0]["dim"], rows[0]["sizes"]
    ends = list(accumulate(sizes))
    return [_slice(g, x, dim, end - n, end) for x, n, end in zip(parts, sizes, ends, strict=True)]


def starts(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``shard_start``."""
    sizes = rows[0]["sizes"]
    return [g.constant(end - n, rows[0]["dtype"]) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def exchanged(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``all_to_all``."""
    attrs = rows[0]
    taken = [_taken(g, x, attrs["split_dim"], attrs["split_sizes"]) for x in parts]
    return [_joined(g, [row[i] for row in taken], attrs["concat_dim"]) for i in range(len(rows))]


def resplit(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``resplit``."""
    dim = rows[0]["dim"]
    taken = [_taken(g, x, dim, sizes) for x, sizes in zip(parts, rows[0]["pieces"], strict=True)]
    return [_joined(g, [row[i] for row in taken], dim) for i in range(len(rows))]


def stretches(g: Builder, parts: Sequence[Value], rows: Rows) -> list[Value]:
    """Serialize ``slices``."""
    return [
        _joined(g, [_slice(g, x, row["dim"], a, b) for a, b in row["intervals"]], row["dim"])
        for x, row in zip(parts, rows, strict=True)
    ]


def _sum(g: Builder, parts: Sequence[Value], op: str) -> Value:
    total = parts[0]
    for number, part in enumerate(parts[1:]):
        total = g.again(g.ops[-1], total, part) if number else g.emit(_JOINED_BY[op], total, part)
    if op == "mean":
        total = g.emit("divide", total, g.constant(float(len(parts)), total.tensor.dtype))
    return total


def _joined(g: Builder, parts: Sequence[Value], dim: int) -> Value:
    found: Any = [x for x in parts if x.tensor.shape[dim]] or parts[:1]
    joined: Value = found[0] if len(found) == 1 else g.emit("concat", *found, axis=dim)
    return joined


def _taken(g: Builder, whole: Value, dim: int, sizes: Sequence[int]) -> list[Value]:
    return [_slice(g, whole, dim, end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def _slice(g: Builder, x: Value, dim: int, start: int, stop: int) -> Value:
    if (start, stop) == (0, x.tensor.shape[dim]):
        return x
    found: Value = g.emit("strided_slice", x, axes=(dim,), begin=(start,), end=(stop,), strides=(1,))
    return found
