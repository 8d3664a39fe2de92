"""Diagonals: read from a matrix as a strided slice, or written into a zero matrix."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, axis_of, like, reshape_to

# ATen spellings


@aten("diagonal.default", "diagonal_copy.default")
def _diagonal(g: Builder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Read elements ``[i - min(offset, 0), i + max(offset, 0)]`` of two dims into a new last dim."""
    rank = len(x.tensor.shape)
    first, second = axis_of(dim1, rank), axis_of(dim2, rank)
    rest = [d for d in range(rank) if d not in (first, second)]
    x = g.aten("permute.default", x, [*rest, first, second])
    *lead, rows, columns = x.tensor.shape
    above, right = max(-offset, 0), max(offset, 0)
    count = max(0, min(rows - above, columns - right))
    x = reshape_to(g, x, (*lead, rows * columns))
    begin, step = above * columns + right if count else 0, columns + 1
    end = begin + (count - 1) * step + 1 if count else 0
    return g.emit("strided_slice", x, axes=(len(lead),), begin=(begin,), end=(end,), strides=(step,))


@aten("linalg_diagonal.default")
def _last_diagonal(g: Builder, x: Value, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return _diagonal(g, x, offset, dim1, dim2)


@aten("diag_embed.default")
def _diag_embed(g: Builder, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Write `x` to a diagonal of a zero matrix, for each element of the leading dims."""
    *lead, count = x.tensor.shape
    size, rank = count + abs(offset), len(lead) + 2
    above = max(-offset, 0)
    low, high = (0,) * len(lead), (0,) * len(lead)
    zero = like(g, x, 0)
    if offset:
        number = 0.0 if "float" in x.tensor.dtype else 0
        x = g.emit("pad", x, low=(*low, above), high=(*high, size - above - count), value=number)
    places = g.emit("arange", start=0, end=size, stride=1, dtype="int64")
    own = g.emit("add", reshape_to(g, places, (size, 1)), g.constant(offset, "int64"))
    y = g.emit("where", g.emit("equal", own, places), reshape_to(g, x, (*lead, size, 1)), zero)
    first, second = axis_of(dim1, rank), axis_of(dim2, rank)
    order = list(range(rank - 2))
    for place, dim in sorted(((first, rank - 2), (second, rank - 1))):
        order.insert(place, dim)
    return g.aten("permute.default", y, order)


@aten("diag.default")
def _diag(g: Builder, x: Value, diagonal: int = 0) -> Any:
    return (_diag_embed if len(x.tensor.shape) == 1 else _diagonal)(g, x, diagonal)


@aten("diagflat.default")
def _diagflat(g: Builder, x: Value, offset: int = 0) -> Any:
    return _diag_embed(g, reshape_to(g, x, (x.tensor.elements,)), offset)


@aten("trace.default")
def _trace(g: Builder, x: Value) -> Any:
    return g.aten("sum.default", _diagonal(g, x))
