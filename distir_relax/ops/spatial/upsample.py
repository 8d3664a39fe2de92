"""Nearest upsampling by integer factors: a scattering window whose kernel is its stride."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import ASYMMETRIC
from distir_relax.ops.spatial.resize import resize
from distir_relax.ops.spatial.strides import ends, set_padding, spatial_rank, strided_windows, torch_widths
from distir_relax.ops.spatial.window_ops import define_spatial
from distir_relax.ops.table import (
    SCATTER,
    Attrs,
    Backward,
    Builder,
    StridedWindow,
    Types,
    gradient_of,
    no_flops,
    operands,
    reshape_to,
)


def _windows(types: Types, attrs: Attrs) -> tuple[StridedWindow, ...]:
    if not len(attrs["strides"]) == spatial_rank(attrs) == len(types[0].shape) - 2:
        raise ValueError(f"expected a tensor of {spatial_rank(attrs) + 2} dims, and a stride for each spatial dim")
    return strided_windows(types[0], attrs, attrs["strides"], SCATTER)


def _torch_upsample(attrs: Attrs) -> str:
    text = "{0}"
    for i, times in enumerate(attrs["strides"]):
        text += f".repeat_interleave({times}, {i + 2})" if times != 1 else ""
    low, high = ends(attrs)
    if any((*low, *high)):
        return f"F.pad({text}, {torch_widths([-n for n in low], [-n for n in high])!r})"
    return text


def _relax_upsample(attrs: Attrs) -> str:
    text = "{0}"
    for i, times in enumerate(attrs["strides"]):
        text = f"R.repeat({text}, {times}, {i + 2})" if times != 1 else text
    low, high = ends(attrs)
    for i, (first, last) in enumerate(zip(low, high, strict=True)):
        if first or last:
            # Relax slices accept a negative end, counted from the back.
            text = f"R.strided_slice({text}, ({i + 2},), ({first},), ({-last if last else 2**31 - 1},))"
    return text


def upsample_nearest(g: Builder, x: Value, sizes: tuple[int, ...]) -> Any:
    """Resize the spatial dims of `x` to the nearest element: by integer factors where possible."""
    have = x.tensor.shape[2:]
    if any(not n or m % n for n, m in zip(have, sizes, strict=True)):
        return resize(g, x, sizes, "nearest_neighbor", ASYMMETRIC)
    times = tuple(m // n for n, m in zip(have, sizes, strict=True))
    return g.emit("nn.upsample_nearest", x, strides=times, padding=(0,) * 2 * len(times))


def _sums(b: Backward) -> Value:
    """Sum the gradients of the repetitions of each element that were not cropped."""
    (low, high), (n, c, *sizes), times = ends(b.attrs), b.x().tensor.shape, b.attrs["strides"]
    grad = b.grad
    if any(b.attrs["padding"]):
        grad = b.emit("pad", grad, low=(0, 0, *low), high=(0, 0, *high), value=0.0)
    grad = reshape_to(b.g, grad, (n, c, *(k for pair in zip(sizes, times, strict=True) for k in pair)))
    axes = tuple(range(3, 3 + 2 * len(sizes), 2))
    return b.emit("sum", grad, axis=axes, keepdims=False)  # type: ignore[no-any-return]


define_spatial(
    "nn.upsample_nearest",
    None,
    _windows,
    floats=False,
    torch=_torch_upsample,
    relax=_relax_upsample,
    linear=(operands(0),),
    windowed=set_padding,
    flops=no_flops,
    gradient=gradient_of(_sums),
)
