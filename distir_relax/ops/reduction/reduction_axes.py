"""Reduction axes and accumulation dtypes."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import Attrs, Builder, Types, cast, dtype_name


def infer_along_axis(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Infer the operand's type; raise ValueError unless attribute `axis` is one of its dims."""
    axis = attrs.get("axis", 0)
    if not 0 <= axis < max(1, len(types[0].shape)):
        raise ValueError(f"axis {axis} of a tensor of {len(types[0].shape)} dims")
    return (TensorType(types[0].shape, types[0].dtype),)


def axes_of(x: Value, dim: Any) -> tuple[int, ...]:
    """Return the dims in `dim` (a number, several, or none for all) as sorted nonnegative indices."""
    rank = len(x.tensor.shape)
    dims = range(rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    # torch accepts a dim for a scalar.
    return tuple(sorted(d + rank if d < 0 else d for d in dims)) if rank else ()


def relax_axes(x: Value, axis: Any) -> tuple[int, ...]:
    """Return the dims of Relax's `axis`; unlike in torch, an empty list means none."""
    return axes_of(x, axis if axis is None or isinstance(axis, int) else tuple(axis))


def reduces_all(x: Value, dim: Any) -> bool:
    """Return whether a reduction over `dim` has no elements."""
    return any(x.tensor.shape[axis] == 0 for axis in axes_of(x, dim))


def reduced_shape(x: Value, dim: Any, keepdim: bool) -> tuple[int, ...]:
    """Return the shape of a reduction of `x` over `dim`."""
    axes = axes_of(x, dim)
    shape = [1 if d in axes else n for d, n in enumerate(x.tensor.shape) if keepdim or d not in axes]
    return tuple(shape)


def cast_for_reduction(g: Builder, x: Value, dtype: Any, summing: bool = False) -> Any:
    """Cast `x` to `dtype`; without one, integers are summed in 64 bits."""
    if dtype is not None:
        return cast(g, x, dtype_name(dtype))
    return cast(g, x, "int64") if summing and "float" not in x.tensor.dtype else x
