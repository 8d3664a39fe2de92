"""Quantization in ONNX: scales and zero points, exact sums of integers, rounding to 8 bits."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.table.builder import Builder
from distir_relax.ops.table.helpers import axis_of, broadcast_to, cast, reshape_to
from distir_relax.ops.table.kernel import Attrs

_BOUNDS = {"int8": (-128.0, 127.0), "uint8": (0.0, 255.0), "int16": (-32768.0, 32767.0)}


def align_scale(g: Builder, x: Value, side: Value, attrs: Attrs) -> Any:
    """Return a scale or zero point of a tensor, of an axis or of blocks along it, so that it broadcasts to `x`."""
    shape, rank = side.tensor.shape, len(x.tensor.shape)
    if not shape or side.tensor.elements == 1:
        return reshape_to(g, side, ()) if shape else side
    axis = axis_of(attrs.get("axis", 1), rank)
    size = attrs.get("block_size", 0)
    if not size:
        wide = [1] * rank
        wide[axis] = side.tensor.elements
        return reshape_to(g, side, tuple(wide))
    before, after = shape[: axis + 1], shape[axis + 1 :]
    spread = broadcast_to(g, reshape_to(g, side, (*before, 1, *after)), (*before, size, *after))
    joined = reshape_to(g, spread, (*before[:-1], before[-1] * size, *after))
    end = x.tensor.shape[axis]
    if joined.tensor.shape[axis] == end:
        return joined
    return g.emit("strided_slice", joined, axes=(axis,), begin=(0,), end=(end,), strides=(1,))


def exact_integers(g: Builder, x: Value, zero: Value | None) -> Value:
    """Return integers as float64, with their zero point subtracted."""
    wide: Value = cast(g, x, "float64")
    return wide if zero is None else g.emit("subtract", wide, cast(g, zero, "float64"))


def requantize(g: Builder, total: Value, scales: tuple[Value, Value, Value], zero: Value) -> Any:
    """Return exact sums in the scale of the result: by first times second over third, a float32."""
    first, second, third = scales
    ratio = g.emit("divide", g.emit("multiply", first, second), third)
    return round_to(g, g.emit("multiply", total, cast(g, ratio, "float64")), zero, zero.tensor.dtype)


def round_to(g: Builder, y: Value, zero: Value | None, dtype: str) -> Any:
    """Round to the nearest integer, to even ones if two are, add the zero point, and saturate."""
    if dtype not in _BOUNDS:
        raise NotImplementedError(f"quantization to {dtype}")
    y = g.emit("round", y)
    y = y if zero is None else g.emit("add", y, cast(g, zero, y.tensor.dtype))
    low, high = _BOUNDS[dtype]
    return cast(g, g.emit("clip", y, min=low, max=high), dtype)
