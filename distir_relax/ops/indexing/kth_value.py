"""Order statistics: the k-th smallest element, and medians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table import Builder, aten, axis_in, cast, like, reshape_to


def _select(g: Builder, x: Value, axis: int, places: Value, keepdim: bool) -> Any:
    """Return the elements at `places`, one along dim `axis`, and the places."""
    results = g.aten("gather.default", x, axis, places), places
    if keepdim:
        return results
    shape = places.tensor.shape
    return tuple(reshape_to(g, y, (*shape[:axis], *shape[axis + 1 :])) for y in results)


def _index_of_rank(g: Builder, x: Value, axis: int, rank: int) -> Any:
    """Return the indices of the elements of one rank along dim `axis`, counted from 0; NaNs are last."""
    order = g.emit("argsort", x, axis=axis, descending=False)
    return g.emit("strided_slice", order, axes=(axis,), begin=(rank,), end=(rank + 1,), strides=(1,))


def _over_all(g: Builder, x: Value, along: Callable[[Builder, Value, int], Any]) -> Any:
    """Return the element that `along` selects from all of `x`; equal elements share its gradient."""
    x = reshape_to(g, x, (x.tensor.elements,))
    y, _ = along(g, x, 0)
    if not g.training or "float" not in x.tensor.dtype:
        return y
    y = g.emit("stop_gradient", y)
    mine = g.emit("equal", x, y)
    count = g.aten("sum.default", cast(g, mine, x.tensor.dtype))
    # A sum of zeros that routes the gradient.
    none = g.aten("sum.default", g.emit("where", mine, g.emit("subtract", x, y), like(g, x, 0)))
    return g.emit("add", y, g.emit("divide", none, count))


# ATen spellings


@aten("kthvalue.default")
def _kthvalue(g: Builder, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.tensor.shape:
        return x, g.constant(0, "int64")
    axis = axis_in(x, dim)
    if not 0 < k <= x.tensor.shape[axis]:
        raise NotImplementedError(f"element {k} of {x.tensor.shape[axis]} by rank")
    return _select(g, x, axis, _index_of_rank(g, x, axis, k - 1), keepdim)


@aten("median.dim")
def _median_dim(g: Builder, x: Value, dim: int, keepdim: bool = False) -> Any:
    """Return the lower median and its index; NaN and the index of the first NaN, if there is one."""
    if not x.tensor.shape:
        return x, g.constant(0, "int64")
    axis = axis_in(x, dim)
    places = _index_of_rank(g, x, axis, (x.tensor.shape[axis] - 1) // 2)
    if "float" in x.tensor.dtype:
        greatest = g.emit("argmax", x, axis=axis, keepdims=True)
        nan = g.emit("isnan", g.aten("gather.default", x, axis, greatest))
        places = g.emit("where", nan, greatest, places)
    return _select(g, x, axis, places, keepdim)


@aten("median.default")
def _median(g: Builder, x: Value) -> Any:
    return _over_all(g, x, _median_dim)


@aten("nanmedian.dim")
def _nanmedian_dim(g: Builder, x: Value, dim: int, keepdim: bool = False) -> Any:
    """Return the median of the elements other than NaN; NaN if there are none."""
    if not x.tensor.shape:
        return x, g.constant(0, "int64")
    axis = axis_in(x, dim)
    if "float" not in x.tensor.dtype:
        return _median_dim(g, x, dim, keepdim)
    order = g.emit("argsort", x, axis=axis, descending=False)
    numbers = cast(g, g.emit("logical_not", g.emit("isnan", x)), "int64")
    count = g.emit("sum", numbers, axis=(axis,), keepdims=True)
    below = g.emit("maximum", g.emit("subtract", count, g.constant(1, "int64")), g.constant(0, "int64"))
    places = g.aten("gather.default", order, axis, g.emit("floor_divide", below, g.constant(2, "int64")))
    return _select(g, x, axis, places, keepdim)


@aten("nanmedian.default")
def _nanmedian(g: Builder, x: Value) -> Any:
    return _over_all(g, x, _nanmedian_dim)
