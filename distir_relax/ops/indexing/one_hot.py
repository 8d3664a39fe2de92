"""One-hot encodings, computed by comparing class indices with 0, 1, …."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.indexing.index_bounds import check_range
from distir_relax.ops.indexing.take import wrap_negative
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, axis_of, cast, onnx, relax, reshape_to


def one_hot(g: Builder, ids: Value, depth: int, axis: int, on: Value, off: Value) -> Any:
    """Return `on` where the new dim `axis` of `depth` elements has the index in `ids`, `off` elsewhere."""
    shape, axis = ids.tensor.shape, axis_of(axis, len(ids.tensor.shape) + 1)
    classes = g.emit("arange", start=0, end=depth, stride=1, dtype=ids.tensor.dtype)
    classes = reshape_to(g, classes, tuple(depth if d == axis else 1 for d in range(len(shape) + 1)))
    return g.emit("where", g.emit("equal", reshape_to(g, ids, (*shape[:axis], 1, *shape[axis:])), classes), on, off)


# ATen spellings


@aten("one_hot.default")
def _one_hot(g: Builder, ids: Value, depth: int = -1) -> Any:
    if depth < 0:
        raise NotImplementedError("a number of classes derived from the largest index: the shape depends on data")
    ids = check_range(g, ids, depth, "one_hot")
    return one_hot(g, ids, depth, -1, g.constant(1, "int64"), g.constant(0, "int64"))


# Relax spellings


@relax("relax.one_hot")
def _relax_one_hot(g: Builder, args: Any, attrs: Attrs) -> Any:
    ids, *numbers = args
    # Relax's dtypes for Python numbers.
    dtype = "float64" if any(isinstance(n, float) for n in numbers) else "int64"
    on, off = (g.constant(n, dtype) for n in numbers)
    return one_hot(g, ids, attrs["depth"], attrs["axis"], on, off)


# ONNX spellings


@onnx("OneHot")
def _onnx_one_hot(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    depth, values = int(x.number(1)), x[2]
    ids = cast(g, wrap_negative(g, x[0], depth), "int64")
    off, on = (reshape_to(g, part, ()) for part in g.emit("split", values, sizes=(1, 1), axis=0))
    return one_hot(g, ids, depth, attrs.get("axis", -1), on, off)
