"""Nearest upsampling by integer factors (a scattering window whose kernel is its stride), and torch's interpolation.

Interpolation uses torch's and Relax's ops; fractional sizes and antialiasing are computed dim by dim (`resample`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import ALIGN_CORNERS, ASYMMETRIC, HALF_PIXEL, NEAREST, Resizing
from distir_relax.layout import is_symbolic
from distir_relax.ops.spatial.resample import ratio_of_sizes, sampling_attrs, scaled_size
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
    aten,
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


def _upsample_gradient(b: Backward) -> Value:
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
    gradient=gradient_of(_upsample_gradient),
)


# ATen spellings


def _smooth(method: str) -> Any:
    def convert(g: Builder, x: Value, size: Any, align: bool, scales: Any = None) -> Any:
        sizes, exact = _sizes(x, size, scales)
        if exact and not align:
            return _resample_dims(g, x, sizes, exact, method, HALF_PIXEL)
        return resize(g, x, sizes, method, ALIGN_CORNERS if align else HALF_PIXEL)

    return convert


def _antialiased(method: str) -> Any:
    def convert(g: Builder, x: Value, size: Any, align: bool, scales: Any = None) -> Any:
        sizes, exact = _sizes(x, size, scales)
        pairs = list(zip(x.tensor.shape[2:], sizes, strict=True))
        factors = exact or [ratio_of_sizes(m, n) for n, m in pairs]
        if align:
            # torch ignores `align_corners` here: it uses the factor of aligned corners with half-pixel positions.
            if is_symbolic(tuple(pairs)):
                raise NotImplementedError("aligned corners of a dim of a symbolic size, with antialiasing")
            if any(1 in pair for pair in pairs):
                raise NotImplementedError("aligned corners of a dim of one element, with antialiasing")
            factors = [(m - 1) / (n - 1) for n, m in pairs]
        how = {"antialias": True, "exclude_outside": True, "cubic_coefficient": -0.5}
        return _resample_dims(g, x, sizes, factors, method, HALF_PIXEL, **how)

    return convert


aten("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")(_smooth("linear"))
aten("upsample_bicubic2d.vec")(_smooth("cubic"))
aten("_upsample_bilinear2d_aa.vec")(_antialiased("linear"))
aten("_upsample_bicubic2d_aa.vec")(_antialiased("cubic"))


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _nearest(g: Builder, x: Value, size: Any = None, scales: Any = None) -> Any:
    sizes, exact = _sizes(x, size, scales)
    if exact:
        return _resample_dims(g, x, sizes, exact, NEAREST, ASYMMETRIC)
    return upsample_nearest(g, x, sizes)


@aten(*(f"_upsample_nearest_exact{n}d.vec" for n in (1, 2, 3)))
def _nearest_exact(g: Builder, x: Value, size: Any = None, scales: Any = None) -> Any:
    sizes, exact = _sizes(x, size, scales)
    factors = exact or [ratio_of_sizes(m, n) for n, m in zip(x.tensor.shape[2:], sizes, strict=True)]
    return _resample_dims(g, x, sizes, factors, NEAREST, HALF_PIXEL, rounding="round_prefer_ceil")


def _sizes(x: Value, size: Any, scales: Any) -> tuple[tuple[int, ...], list[float] | None]:
    """Return the requested sizes, and the factors if they give fractional sizes."""
    if size is not None:
        return tuple(size), None
    have = x.tensor.shape[2:]
    sizes = tuple(scaled_size(n, s) for n, s in zip(have, scales, strict=True))
    integral = all(s == int(s) if is_symbolic(n) else n * s == m for n, s, m in zip(have, scales, sizes, strict=True))
    return sizes, None if integral else list(scales)


def _resample_dims(
    g: Builder, x: Value, sizes: Sequence[int], scales: Sequence[float], method: str, place: str, **how: Any
) -> Any:
    for axis, (want, scale) in enumerate(zip(sizes, scales, strict=True), start=2):
        if scale != 1:
            sampling = Resizing(method, place, float(scale), **how)
            x = g.emit("resample", x, axis=axis, size=want, **sampling_attrs(sampling))
    return x
