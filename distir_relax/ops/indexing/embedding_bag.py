"""Embedding bags: sums, means and maxima of bags of embedding rows."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.indexing.index_bounds import check_range
from distir_relax.ops.table import Builder, aten, broadcast_to, cast, filled, like, reshape_to

_SUM, _MEAN, _MAX = 0, 1, 2


def _length_of_bags(g: Builder, offsets: Value, bags: int, count: int) -> int:
    """Return the length of the bags if it is constant and equal for all; otherwise 0."""
    data = g.constants.get(offsets.name)
    if data is None or not bags or not count or count % bags:
        return 0
    length = count // bags
    return length if data.tolist() == [i * length for i in range(data.numel())] else 0


def _bags_of_one_length(
    g: Builder, table: Value, ids: Value, weights: Value | None, mask: Value | None, mode: int
) -> Any:
    """Reduce the lookups of equally long bags, the rows of `ids`, over one dim."""
    rows = g.emit("take", table, ids, axis=0)
    wide = (*ids.tensor.shape, 1)
    if weights is not None:
        rows = g.emit("multiply", rows, reshape_to(g, weights, wide))
    if mask is not None:
        rows = g.emit("where", reshape_to(g, mask, wide), rows, like(g, rows, -math.inf if mode == _MAX else 0))
    if mode == _MAX:
        y = g.emit("max", rows, axis=(1,), keepdims=False, ties="first")
    else:
        y = g.emit("sum", rows, axis=(1,), keepdims=False)
    numbers = filled(g, ids.tensor.shape, 1, y.tensor.dtype) if mask is None else cast(g, mask, y.tensor.dtype)
    count = None if mask is None and mode != _MEAN else g.emit("sum", numbers, axis=(1,), keepdims=True)
    return _divided_or_zero(g, y, count, mode)


def _ragged_bags(
    g: Builder, table: Value, ids: Value, offsets: Value, bags: int, weights: Value | None, mask: Value | None,
    mode: int,
) -> Any:  # fmt: skip
    """Reduce bags that are ranges of `ids`: accumulate each row into the bag with its number."""
    rows, count = g.emit("take", table, ids, axis=0), ids.tensor.elements
    dtype = rows.tensor.dtype
    places = g.emit("arange", start=0, end=count, stride=1, dtype=offsets.tensor.dtype)
    begun = g.aten("bucketize.Tensor", places, offsets, right=True)
    numbers = g.emit("subtract", begun, like(g, begun, 1))
    # With the last offset included, one more segment collects the rows after it.
    segments = offsets.tensor.elements
    if weights is not None:
        rows = g.emit("multiply", rows, reshape_to(g, weights, (count, 1)))
    if mask is not None:
        rows = g.emit("where", reshape_to(g, mask, (count, 1)), rows, like(g, rows, -math.inf if mode == _MAX else 0))
    if mode == _MAX:
        width = table.tensor.shape[1]
        nothing = filled(g, (segments, width), -math.inf, dtype)
        wide = broadcast_to(g, reshape_to(g, numbers, (count, 1)), (count, width))
        y = g.emit("scatter_elements", nothing, wide, rows, axis=0, reduction="max")
        if g.training:
            y = _first_maxima(g, rows, wide, y)
    else:
        y = g.emit("segment_sum", rows, numbers, num_segments=segments)
    ones = filled(g, (count,), 1, dtype) if mask is None else cast(g, mask, dtype)
    total = None if mode == _SUM else g.emit("segment_sum", ones, numbers, num_segments=segments)
    y = _divided_or_zero(g, y, None if total is None else reshape_to(g, total, (segments, 1)), mode)
    return y if segments == bags else g.aten("slice.Tensor", y, 0, 0, bags)


def _first_maxima(g: Builder, rows: Value, numbers: Value, largest: Value) -> Any:
    """Return the maximum of each bag, read from its first row that attains it, which gets the gradient."""
    count, width = rows.tensor.shape
    places = g.emit("arange", start=0, end=count, stride=1, dtype="int64")
    end = g.constant(count, "int64")
    mine = g.emit("equal", rows, g.emit("gather_elements", largest, numbers, axis=0))
    at = g.emit("where", mine, broadcast_to(g, reshape_to(g, places, (count, 1)), (count, width)), end)
    none = filled(g, largest.tensor.shape, count, "int64")
    first = g.emit("scatter_elements", none, numbers, at, axis=0, reduction="min")
    maxima = g.emit("gather_elements", rows, g.emit("minimum", first, g.constant(count - 1, "int64")), axis=0)
    return g.emit("where", g.emit("less", first, end), maxima, largest)


def _divided_or_zero(g: Builder, y: Value, count: Value | None, mode: int) -> Any:
    """Divide a mean by the number of rows; return zero for empty bags."""
    if count is None or mode == _SUM:
        return y
    if mode == _MAX:
        return g.emit("where", g.emit("greater", count, like(g, count, 0)), y, like(g, y, 0))
    return g.emit("divide", y, g.emit("maximum", count, like(g, count, 1)))


# ATen spellings


@aten("embedding_bag.default", "embedding_bag.padding_idx")
def _embedding_bag(
    g: Builder, table: Value, ids: Value, offsets: Value, scale_by_count: bool = False, mode: int = _SUM,
    sparse: bool = False, weights: Value | None = None, include_last: bool = False, padding: int | None = None,
) -> Any:  # fmt: skip
    """Bag `i` begins at ``offsets[i]``, and ends at the next offset. Row `padding` is excluded.

    Further results of torch's op, which only its own backward step reads, are omitted.
    """
    if scale_by_count and g.training:
        raise NotImplementedError("gradients that are scaled by how often a row is looked up")
    size, width = table.tensor.shape
    bags, count = offsets.tensor.elements - include_last, ids.tensor.elements
    if not count or not bags:
        return filled(g, (bags, width), 0.0, table.tensor.dtype), None, None, None
    ids = check_range(g, ids, size, "embedding_bag")
    mask = None
    if padding is not None:
        mask = g.emit("not_equal", ids, like(g, ids, padding % size))
    if length := _length_of_bags(g, offsets, bags, count):
        shape = (bags, length)
        weights, mask = (None if x is None else reshape_to(g, x, shape) for x in (weights, mask))
        y = _bags_of_one_length(g, table, reshape_to(g, ids, shape), weights, mask, mode)
    else:
        y = _ragged_bags(g, table, ids, offsets, bags, weights, mask, mode)
    return y, None, None, None


@aten("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag_decomposed(
    g: Builder, table: Value, ids: Value, offsets: Value, scale_by_count: bool = False, mode: int = _SUM,
    sparse: bool = False, weights: Value | None = None, include_last: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """As the function, with -1 for no `padding`."""
    some = None if padding < 0 else padding
    return _embedding_bag(g, table, ids, offsets, scale_by_count, mode, sparse, weights, include_last, some)
