"""Search in sorted tensors, and masked scatters, decomposed: each number is compared with all bounds."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, broadcast_to, cast, like, promote, reshape_to

# ATen spellings


@aten("masked_scatter.default", "masked_scatter_.default")
def _masked_scatter(g: Builder, x: Value, mask: Value, source: Value) -> Any:
    """Replace elements where the mask is true by those of `source`, at the number of true ones before."""
    shape, flat = x.tensor.shape, (x.tensor.elements,)
    mask = broadcast_to(g, mask, shape)
    count = g.emit("cumsum", cast(g, reshape_to(g, mask, flat), "int64"), axis=0)
    place = g.emit("maximum", g.emit("subtract", count, like(g, count, 1)), like(g, count, 0))
    # After the last true element the lookup is masked.
    place = g.emit("minimum", place, like(g, count, max(0, source.tensor.elements - 1)))
    values = g.emit("take", reshape_to(g, source, (source.tensor.elements,)), place, axis=0)
    return g.emit("where", mask, like(g, x, reshape_to(g, values, shape)), x)


@aten("bucketize.Tensor")
def _bucketize(g: Builder, x: Value, bounds: Value, *, out_int32: bool = False, right: bool = False) -> Any:
    """Count the sorted bounds that are less than each number, or with `right` not greater; NaN is above all."""
    wide = reshape_to(g, x, (*x.tensor.shape, 1))
    below = g.emit("logical_not", g.emit("greater" if right else "greater_equal", *promote(g, bounds, wide)))
    total = g.emit("sum", cast(g, below, "int64"), axis=(len(x.tensor.shape),), keepdims=False)
    return cast(g, total, "int32") if out_int32 else total


@aten("searchsorted.Tensor")
def _search_sorted(
    g: Builder, bounds: Value, x: Value, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Value | None = None,
) -> Any:  # fmt: skip
    if sorter is not None:
        raise NotImplementedError("a search with a sorter")
    if len(bounds.tensor.shape) > 1:
        # Each row has its own bounds.
        bounds = reshape_to(g, bounds, (*bounds.tensor.shape[:-1], 1, bounds.tensor.shape[-1]))
    return _bucketize(g, x, bounds, out_int32=out_int32, right=right or side == "right")


@aten("isin.Tensor_Tensor")
def _is_in(g: Builder, x: Value, items: Value, *, assume_unique: bool = False, invert: bool = False) -> Any:
    wide = reshape_to(g, x, (*x.tensor.shape, 1))
    same = g.emit("equal", *promote(g, wide, reshape_to(g, items, (items.tensor.elements,))))
    present = g.aten("any.dim", same, len(x.tensor.shape))
    return g.emit("logical_not", present) if invert else present


@aten("isin.Tensor_Scalar")
def _is_scalar(g: Builder, x: Value, item: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    return g.emit("not_equal" if invert else "equal", *promote(g, x, item))
