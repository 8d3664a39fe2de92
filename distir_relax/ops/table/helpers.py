"""Helpers for conversions: casts, reshapes, broadcasts and filled tensors; spellings that are ATen ops.

A cast, reshape or broadcast returns its operand unchanged if there is nothing to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.layout import is_symbolic
from distir_relax.ops.table.builder import Builder
from distir_relax.ops.table.expansion import Emitter
from distir_relax.ops.table.size_array import SizeArray
from distir_relax.ops.table.table import onnx, relax


def axis_of(axis: int, rank: int) -> int:
    """Return a dim as a nonnegative index, for a tensor of `rank` dims."""
    return axis + rank if axis < 0 else axis


def axis_in(x: Value, dim: int) -> int:
    """Return a dim of `x` as a nonnegative index; 0 for a scalar."""
    return dim % max(1, len(x.tensor.shape))


def reshape_to(g: Builder, x: Value, shape: tuple[int, ...]) -> Any:
    """Reshape `x`, if it has another shape."""
    return x if x.tensor.shape == tuple(shape) else g.emit("reshape", x, shape=tuple(shape))


def broadcast_to(g: Builder, x: Value, shape: tuple[int, ...]) -> Any:
    """Broadcast `x` to `shape`, if it has another shape."""
    return x if x.tensor.shape == tuple(shape) else g.emit("broadcast_to", x, shape=tuple(shape))


_PROMOTION = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def promote(g: Builder, *items: Any, floating: bool = False) -> list[Any]:
    """Return the items as values of one dtype by torch's promotion: a Python number never widens a tensor of its kind.

    `floating` requires a floating dtype, as torch's true division and transcendental functions do.
    """
    tensors = [item.tensor for item in items if isinstance(item, Value)]
    dtype = joined([t.dtype for t in tensors if t.shape] or [t.dtype for t in tensors])
    scalar = joined([t.dtype for t in tensors])
    # A scalar tensor counts only if it is of a higher kind: a float among integers, a number among booleans.
    if _kind(scalar) > _kind(dtype):
        dtype = joined([t.dtype for t in tensors if not t.shape])
    for item in items:
        if isinstance(item, float) and "float" not in dtype:
            dtype = g.default_dtype
        elif isinstance(item, int) and not isinstance(item, bool) and dtype == "bool":
            dtype = "int64"
    if floating and "float" not in dtype:
        dtype = g.default_dtype
    return [_as_dtype(g, item, dtype) for item in items]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements are in memory in the order of its dims, in elements."""
    return tuple(math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))


def joined(dtypes: Sequence[str]) -> str:
    """Return the smallest dtype that can represent all of these."""
    dtype = max(dtypes, key=_PROMOTION.index)
    if dtype == "bfloat16" and "float16" in dtypes:
        return "float32"
    return "int16" if dtype == "int8" and "uint8" in dtypes else dtype


def _kind(dtype: str) -> int:
    return 2 if "float" in dtype else int("int" in dtype)


def cast(g: Builder, value: Value, dtype: str) -> Any:
    """Cast `value` to `dtype`, if it has another."""
    return value if value.tensor.dtype == dtype else g.emit("astype", value, dtype=dtype)


def like(g: Builder, x: Value, value: Any) -> Any:
    """Return a number or a tensor in the dtype of `x`."""
    return _as_dtype(g, value, x.tensor.dtype)


def ratio(g: Emitter, numerator: int, denominator: int, dtype: str) -> Any:
    """Return the quotient of two sizes as a scalar: infinite if the second is 0."""
    if not is_symbolic((numerator, denominator)):
        return g.emit("constant", value=numerator / denominator if denominator else math.inf, dtype=dtype)
    # A narrow float cannot represent large sizes.
    wide = "float64" if dtype == "float64" else "float32"
    quotient = g.emit("divide", *(g.emit("constant", value=n, dtype=wide) for n in (numerator, denominator)))
    return quotient if dtype == wide else g.emit("astype", quotient, dtype=dtype)


def filled(g: Builder, shape: Sequence[int], value: Any, dtype: str) -> Any:
    """Return a tensor of `shape` filled with `value`, a number or a scalar."""
    return broadcast_to(g, _as_dtype(g, value, dtype), tuple(shape))


def _as_dtype(g: Builder, value: Any, dtype: str) -> Any:
    return cast(g, value, dtype) if isinstance(value, Value) else g.constant(value, dtype)


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype; a name is returned as it is."""
    return str(dtype).removeprefix("torch.")


def relax_as_aten(name: str, spelling: str, *attributes: str) -> None:
    """Register a Relax op that is an ATen op of the same arguments, followed by these attributes."""

    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        return g.aten(spelling, *args, *(attrs[key] for key in attributes))

    relax(name)(convert)


def onnx_as_aten(op_type: str, spelling: str, *attributes: tuple[str, Any]) -> None:
    """Register an ONNX op that is an ATen op of the same operands, followed by these attributes with their defaults."""

    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        operands = [x[i] for i in range(len(x))]
        return g.aten(spelling, *operands, *(attrs.get(key, default) for key, default in attributes))

    onnx(op_type)(convert)


def place_sizes(g: Builder, array: SizeArray) -> Any:
    """Compute a tensor of symbolic elements at run time, from their values in a call."""
    numbers = [g.constant(n, array.dtype) for n in array.entries.reshape(-1).tolist()]
    if not array.shape:
        return numbers[0]
    parts = [reshape_to(g, n, (1,)) for n in numbers]
    return reshape_to(g, parts[0] if len(parts) == 1 else g.emit("concat", *parts, axis=0), array.shape)
