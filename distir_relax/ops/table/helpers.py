"""What conversions write programs with: values of one dtype, of a shape, filled with a number.

Each gives its operand back where nothing needs to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table.builder import Builder


def axis_of(axis: int, rank: int) -> int:
    """A dim counted from the front, of a tensor of `rank` dims."""
    return axis + rank if axis < 0 else axis


def axis_in(x: Value, dim: int) -> int:
    """A dim of `x` counted from the front; 0 for one of a scalar."""
    return dim % max(1, len(x.tensor.shape))


def reshape_to(g: Builder, x: Value, shape: tuple[int, ...]) -> Any:
    """`x` reshaped; itself when it has that shape already."""
    return x if x.tensor.shape == tuple(shape) else g.emit("reshape", x, shape=tuple(shape))


def broadcast_to(g: Builder, x: Value, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to `shape`; itself when it has that shape already."""
    return x if x.tensor.shape == tuple(shape) else g.emit("broadcast_to", x, shape=tuple(shape))


_PROMOTION = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def promote(g: Builder, *items: Any, floating: bool = False) -> list[Any]:
    """The items as values of one dtype, by torch's rules: a Python number never widens a tensor within its kind.

    `floating` asks for a floating dtype, as torch's true division and transcendental functions do.
    """
    tensors = [item.tensor for item in items if isinstance(item, Value)]
    dtype = joined([t.dtype for t in tensors if t.shape] or [t.dtype for t in tensors])
    scalar = joined([t.dtype for t in tensors])
    # A scalar tensor counts where it is of another kind: a float among integers, a number among truth values.
    if _kind(scalar) > _kind(dtype):
        dtype = joined([t.dtype for t in tensors if not t.shape])
    for item in items:
        if isinstance(item, float) and "float" not in dtype:
            dtype = "float32"
        elif isinstance(item, int) and not isinstance(item, bool) and dtype == "bool":
            dtype = "int64"
    if floating and "float" not in dtype:
        dtype = "float32"
    return [_as_dtype(g, item, dtype) for item in items]


def joined(dtypes: Sequence[str]) -> str:
    """The least dtype that has the numbers of all of these."""
    dtype = max(dtypes, key=_PROMOTION.index)
    if dtype == "bfloat16" and "float16" in dtypes:
        return "float32"
    return "int16" if dtype == "int8" and "uint8" in dtypes else dtype


def _kind(dtype: str) -> int:
    return 2 if "float" in dtype else int("int" in dtype)


def cast(g: Builder, value: Value, dtype: str) -> Any:
    """`value` as `dtype`; itself when it is that already."""
    return value if value.tensor.dtype == dtype else g.emit("astype", value, dtype=dtype)


def like(g: Builder, x: Value, value: Any) -> Any:
    """A number, or a tensor, in the dtype of `x`."""
    return _as_dtype(g, value, x.tensor.dtype)


def filled(g: Builder, shape: Sequence[int], value: Any, dtype: str) -> Any:
    """A tensor of `shape` that holds `value`, a number or a scalar, everywhere."""
    return broadcast_to(g, _as_dtype(g, value, dtype), tuple(shape))


def _as_dtype(g: Builder, value: Any, dtype: str) -> Any:
    return cast(g, value, dtype) if isinstance(value, Value) else g.constant(value, dtype)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch, or a name as it is."""
    return str(dtype).removeprefix("torch.")
