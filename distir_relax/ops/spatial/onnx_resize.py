"""ONNX's Resize in all its forms.

Forms that torch supports are lowered to torch's op. All others are resized dim by dim
(`distir_relax.ops.spatial.resample`).

The positions and weights are those of the ONNX standard, operator Resize, version 19.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distir_relax.ir import Value
from distir_relax.kernels.sampling import ALIGN_CORNERS, CROP, HALF_PIXEL, NEAREST, Resizing
from distir_relax.layout import is_symbolic
from distir_relax.ops.spatial.interpolate import upsample_nearest
from distir_relax.ops.spatial.resample import ratio_of_sizes, sampling_attrs, scaled_size
from distir_relax.ops.spatial.resize import resize
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, onnx

# Coordinate mappings with their rounding that repeat each element equally often.
_REPEATS = {
    *(
        (place, f"round_prefer_{rounding}")
        for place in ("half_pixel", "pytorch_half_pixel")
        for rounding in ("floor", "ceil")
    ),
    ("asymmetric", "floor"),
}

PLACES = {HALF_PIXEL, ALIGN_CORNERS, CROP, "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric"}
"""ONNX's mappings from positions in the result to positions in the operand."""


@dataclass(frozen=True)
class _Dim:
    """One dim to resize: its sizes before and after, the requested scale, and the part of it (`roi`) to resize."""

    axis: int
    have: int
    want: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


@onnx("Resize", "Upsample")
def _onnx_resize(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    old = attrs["opset"] < 11
    place = attrs.get("coordinate_transformation_mode", "asymmetric" if old else HALF_PIXEL)
    rounding = attrs.get("nearest_mode", "floor" if old else "round_prefer_floor")
    mode = attrs.get("mode", "nearest")
    dims = _dims(x, attrs, place)
    if place != CROP and all(d.have == d.want and d.scale == 1 for d in dims):
        return x[0]
    result = _resize_by_torch(g, x[0], dims, mode, place, rounding, attrs)
    if result is not None:
        return result
    if place not in PLACES:
        raise NotImplementedError(f"resizing with coordinates {place!r}")
    if mode != "nearest" and "float" not in x[0].tensor.dtype:
        raise NotImplementedError(f"an interpolation of {x[0].tensor.dtype}")
    sampling = Resizing(
        NEAREST if mode == "nearest" else mode, place, 1.0, rounding, (0.0, 1.0), attrs.get("cubic_coeff_a", -0.75),
        bool(attrs.get("antialias")), bool(attrs.get("exclude_outside")),
    )  # fmt: skip
    y, samplings = x[0], [replace(sampling, scale=dim.scale, roi=dim.roi) for dim in dims]
    for dim, one in zip(dims, samplings, strict=True):
        y = g.emit("resample", y, axis=dim.axis, size=dim.want, **sampling_attrs(one))
    return _extrapolated(g, x, y, dims, samplings, attrs.get("extrapolation_value", 0.0)) if place == CROP else y


def _dims(x: OnnxOperands, attrs: Mapping[str, Any], place: str) -> list[_Dim]:
    """Return the dims to resize, without those whose resizing is the identity."""
    have, rank = x[0].tensor.shape, len(x[0].tensor.shape)
    old = attrs["opset"] < 11
    axes = [a % rank for a in attrs.get("axes", range(rank))]
    sizes = None if old else x.numbers(3)
    if sizes:
        exact = [ratio_of_sizes(size, have[a]) for a, size in zip(axes, sizes, strict=True)]
        policy = attrs.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = (min if policy == "not_larger" else max)(exact)
            exact = [one] * len(axes)
            sizes = [math.floor(have[a] * one + 0.5) for a in axes]
    else:
        exact = attrs.get("scales") or x.numbers(1 if old else 2)
        sizes = [scaled_size(have[a], scale) for a, scale in zip(axes, exact, strict=True)]
    roi = x.numbers(1) if place == CROP else [0.0] * len(axes) + [1.0] * len(axes)
    dims = [
        _Dim(axis, have[axis], sizes[i], float(exact[i]), (float(roi[i]), float(roi[i + len(axes)])))
        for i, axis in enumerate(axes)
    ]
    return [d for d in dims if (d.have, d.scale, d.roi) != (d.want, 1.0, (0.0, 1.0))]


def _resize_by_torch(
    g: Builder, x: Value, dims: Sequence[_Dim], mode: str, place: str, rounding: str, attrs: Mapping[str, Any]
) -> Any:
    """Resize spatial dims by an op of torch; return None if there is none."""
    shape = list(x.tensor.shape)
    for dim in dims:
        shape[dim.axis] = dim.want
        is_exact = dim.scale.is_integer() if is_symbolic(dim.have) else dim.have * dim.scale == dim.want
        if dim.axis < 2 or not is_exact:
            return None
    have, target = x.tensor.shape[2:], tuple(shape[2:])
    if mode == "nearest":
        repeats = (place, rounding) in _REPEATS and not any(m % n for n, m in zip(have, target, strict=True))
        return upsample_nearest(g, x, target) if repeats else None
    if attrs.get("antialias") or attrs.get("cubic_coeff_a", -0.75) != -0.75 or attrs.get("exclude_outside"):
        return None
    if place not in (HALF_PIXEL, "pytorch_half_pixel", ALIGN_CORNERS) or (
        place == "pytorch_half_pixel" and 1 in target
    ):
        return None
    if not 1 <= len(have) <= (2 if mode == "cubic" else 3) or "float" not in x.tensor.dtype:
        return None
    return resize(g, x, target, mode, ALIGN_CORNERS if place == ALIGN_CORNERS else HALF_PIXEL)


def _extrapolated(
    g: Builder, x: OnnxOperands, y: Value, dims: Sequence[_Dim], samplings: Sequence[Resizing], value: float
) -> Any:
    """Return `y`, with `value` where an element lies outside the operand."""
    import numpy as np

    outside: Any = np.zeros([1] * len(y.tensor.shape), dtype=bool)
    for dim, sampling in zip(dims, samplings, strict=True):
        positions = sampling.places(dim.have, dim.want)
        shape = [dim.want if d == dim.axis else 1 for d in range(len(y.tensor.shape))]
        outside = outside | ((positions < 0) | (positions > dim.have - 1)).reshape(shape)
    return g.emit("where", x.constant(outside), g.constant(value, y.tensor.dtype), y)
