"""Multi-index gathers and scatters (GatherND, ScatterND) over the first dims of a tensor.

The indexed dims are flattened, and the indices of each point are combined into one. So the ops over a single dim apply:
lookup, scatter of rows, segment sum. The outermost indexed dim may then be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.indexing.scatter import flatten_indices, onnx_reduction, write_points
from distir_relax.ops.indexing.take import index, to_nonnegative
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, broadcast_to, cast, onnx, relax, reshape_to


def _columns(g: Builder, ids: Value) -> list[Any]:
    """Return the columns of `ids`: the indices in its last dim, one by one."""
    *shape, count = ids.tensor.shape
    parts = [ids] if count == 1 else g.emit("split", ids, sizes=(1,) * count, axis=len(shape))
    return [reshape_to(g, part, tuple(shape)) for part in parts]


def _nonnegative_indices(g: Builder, indices: Sequence[Any], sizes: Sequence[int], user: str) -> list[Any]:
    """Return the indices that `user` takes into dims of `sizes`, as nonnegative indices; there may be more dims."""
    return [to_nonnegative(g, ids, size, user) for ids, size in zip(indices, sizes, strict=False)]


def _scatter_nd(g: Builder, x: Value, ids: Value, updates: Value, reduction: str) -> Any:
    columns = _nonnegative_indices(g, _columns(g, ids), x.tensor.shape, "scatter_nd")
    return write_points(g, x, range(len(columns)), columns, updates, reduction)


def _gather_nd(g: Builder, x: Value, ids: Value, batch: int) -> Any:
    """Emit ``result[b, i] = x[b, ids[b, i]]``, where `x` and `ids` share the first `batch` dims."""
    shape, count = x.tensor.shape, ids.tensor.shape[-1]
    sizes, rest = shape[batch : batch + count], shape[batch + count :]
    columns = _nonnegative_indices(g, _columns(g, ids), sizes, "gather_nd")
    if not batch:
        return g.emit("index_tensor", x, *columns, count=count)
    flat = flatten_indices(g, columns, sizes)
    lead, picked = shape[:batch], flat.tensor.shape[batch:]
    count = math.prod(picked)
    x = reshape_to(g, x, (*lead, math.prod(sizes), *rest))
    flat = reshape_to(g, flat, (*lead, count, *(1,) * len(rest)))
    y = g.emit("gather_elements", x, broadcast_to(g, flat, (*lead, count, *rest)), axis=batch)
    return reshape_to(g, y, (*lead, *picked, *rest))


# ATen spellings


@aten("index_put.default", "index_put_.default")
def _index_put(g: Builder, x: Value, indices: list[Any], values: Value, accumulate: bool = False) -> Any:
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    values = cast(g, values, x.tensor.dtype)
    if any(index.tensor.dtype == "bool" for _, index in used):
        return _masked_put(g, x, indices, values, accumulate)
    dims = [dim for dim, _ in used]
    places = _nonnegative_indices(g, [index for _, index in used], [x.tensor.shape[dim] for dim in dims], "index_put")
    return write_points(g, x, dims, places, values, "add" if accumulate else "update")


def _masked_put(g: Builder, x: Value, indices: list[Any], values: Value, accumulate: bool) -> Any:
    """Write a scalar where a mask over the first dims is true."""
    (mask, *others), rank = indices, len(x.tensor.shape)
    if others or values.tensor.elements != 1:
        raise NotImplementedError(
            "writing by a mask other than one number: how many elements there are depends on data"
        )
    wide = reshape_to(g, mask, (*mask.tensor.shape, *(1,) * (rank - len(mask.tensor.shape))))
    number = reshape_to(g, values, ())
    return g.emit("where", wide, g.emit("add", x, number) if accumulate else number, x)


# Relax spellings


@relax("relax.index_tensor")
def _relax_index_tensor(g: Builder, args: Any, attrs: Attrs) -> Any:
    return index(g, args[0], args[1])


@relax("relax.index_put")
def _relax_index_put(g: Builder, args: Any, attrs: Attrs) -> Any:
    x, indices, values = args
    indices = indices if isinstance(indices, list) else [indices]
    return _index_put(g, x, indices, values, attrs["accumulate"])


@relax("relax.scatter_nd")
def _relax_scatter_nd(g: Builder, args: Any, attrs: Attrs) -> Any:
    return _scatter_nd(g, args[0], args[1], args[2], attrs["reduction"])


@relax("relax.gather_nd")
def _relax_gather_nd(g: Builder, args: Any, attrs: Attrs) -> Any:
    return _gather_nd(g, args[0], args[1], attrs["batch_dims"])


# ONNX spellings


@onnx("ScatterND")
def _onnx_scatter_nd(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _scatter_nd(g, x[0], x[1], x[2], onnx_reduction(attrs))


@onnx("GatherND")
def _onnx_gather_nd(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _gather_nd(g, x[0], x[1], attrs.get("batch_dims", 0))
