"""Elements named by several indices at once: reading and writing points of the first dims of a tensor.

The indexed dims are made one and each point's indices one number, so that the ops of one dim do: a look-up, a scatter
of rows, a sum by number. The outermost indexed dim may then be split.
"""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ops.indexing import from_front, index
from distir_relax.ops.pointwise import cast
from distir_relax.ops.registry import aten, onnx_spelling, relax_spelling
from distir_relax.ops.scatter import one_number, spread_to, write_points
from distir_relax.ops.scatter_calls import onnx_reduction
from distir_relax.ops.shape import reshape_to


def _columns(g: Any, ids: Any) -> list[Any]:
    """The indices that stand side by side in the last dim of `ids`, each by itself."""
    *shape, count = ids.type.shape
    parts = [ids] if count == 1 else g.emit("split", ids, sizes=(1,) * count, axis=len(shape))
    return [reshape_to(g, part, tuple(shape)) for part in parts]


def _scatter_nd(g: Any, x: Any, ids: Any, updates: Any, reduction: str) -> Any:
    columns = _columns(g, ids)
    return write_points(g, x, range(len(columns)), columns, updates, reduction)


def _gather_nd(g: Any, x: Any, ids: Any, batch: int) -> Any:
    """``result[b, i] = x[b, ids[b, i]]``: the first `batch` dims of both are one and the same."""
    columns, shape = _columns(g, ids), x.type.shape
    sizes, rest = shape[batch : batch + len(columns)], shape[batch + len(columns) :]
    if not batch:
        fronted = [from_front(g, column, size) for column, size in zip(columns, sizes, strict=True)]
        return g.emit("index_tensor", x, *fronted, count=len(columns))
    flat = one_number(g, columns, sizes)
    lead, picked = shape[:batch], flat.type.shape[batch:]
    count = math.prod(picked)
    x = reshape_to(g, x, (*lead, math.prod(sizes), *rest))
    flat = reshape_to(g, flat, (*lead, count, *(1,) * len(rest)))
    y = g.emit("gather_elements", x, spread_to(g, flat, (*lead, count, *rest)), axis=batch)
    return reshape_to(g, y, (*lead, *picked, *rest))


# ATen spellings


@aten("index_put.default", "index_put_.default")
def _index_put(g: Any, x: Any, indices: list[Any], values: Any, accumulate: bool = False) -> Any:
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    values = cast(g, values, x.type.dtype)
    if any(index.type.dtype == "bool" for _, index in used):
        return _put_masked(g, x, indices, values, accumulate)
    return write_points(g, x, [d for d, _ in used], [i for _, i in used], values, "add" if accumulate else "update")


def _put_masked(g: Any, x: Any, indices: list[Any], values: Any, accumulate: bool) -> Any:
    """One mask over the first dims, and one number to put where it holds."""
    (mask, *others), rank = indices, len(x.type.shape)
    if others or values.type.elements != 1:
        raise NotImplementedError(
            "writing by a mask other than one number: how many elements there are depends on data"
        )
    wide = reshape_to(g, mask, (*mask.type.shape, *(1,) * (rank - len(mask.type.shape))))
    number = reshape_to(g, values, ())
    return g.emit("where", wide, g.emit("add", x, number) if accumulate else number, x)


# Relax spellings


@relax_spelling("relax.index_tensor")
def _relax_index_tensor(g: Any, args: Any, attrs: Any) -> Any:
    return index(g, args[0], args[1])


@relax_spelling("relax.index_put")
def _relax_index_put(g: Any, args: Any, attrs: Any) -> Any:
    x, indices, values = args
    indices = indices if isinstance(indices, list) else [indices]
    return _index_put(g, x, indices, values, attrs["accumulate"])


@relax_spelling("relax.scatter_nd")
def _relax_scatter_nd(g: Any, args: Any, attrs: Any) -> Any:
    return _scatter_nd(g, args[0], args[1], args[2], attrs["reduction"])


@relax_spelling("relax.gather_nd")
def _relax_gather_nd(g: Any, args: Any, attrs: Any) -> Any:
    return _gather_nd(g, args[0], args[1], attrs["batch_dims"])


# ONNX spellings


@onnx_spelling("ScatterND")
def _onnx_scatter_nd(g: Any, x: Any, attrs: Any) -> Any:
    return _scatter_nd(g, x[0], x[1], x[2], onnx_reduction(attrs))


@onnx_spelling("GatherND")
def _onnx_gather_nd(g: Any, x: Any, attrs: Any) -> Any:
    return _gather_nd(g, x[0], x[1], attrs.get("batch_dims", 0))
