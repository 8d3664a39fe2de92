"""ONNX's Resize in all its forms.

What torch resizes too keeps the op that torch has for it. Everything else is resized dim by dim, by what is known at
import: the nearest element is looked up; an interpolation is a product with a matrix of weights, one row for each
element of the result. A product splits along the dim that is resized, each device weighing what it holds.

The positions and weights are those of the ONNX standard, operator Resize, version 19.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distir_relax.ops.interpolate import ALIGN_CORNERS, HALF_PIXEL, resize
from distir_relax.ops.registry import onnx_spelling
from distir_relax.ops.resize import upsample_nearest

Array = np.ndarray[Any, np.dtype[np.float64]]

_ROUNDED: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}

# How a result's position is taken back to the operand's, with the rounding: those that repeat each element in turn.
_REPEATS = {
    *((place, f"round_prefer_{way}") for place in ("half_pixel", "pytorch_half_pixel") for way in ("floor", "ceil")),
    ("asymmetric", "floor"),
}


@dataclass(frozen=True)
class _Dim:
    """One dim to resize: its sizes before and after, the scale asked for, and the part of it (`roi`) that is resized."""

    axis: int
    have: int
    want: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)

    @property
    def width(self) -> float:
        """The size of the result before it is cut off to whole elements."""
        exact = self.scale * self.have
        return float(self.want) if math.isclose(exact, self.want) else exact

    def positions(self, place: str) -> Array:
        """Where each element of the result lies in the operand, elements being 1 apart."""
        at = np.arange(self.want, dtype=np.float64)
        if place == "asymmetric":
            return at / self.scale
        if place == ALIGN_CORNERS:
            return at * (self.have - 1) / (self.width - 1) if self.width != 1 else 0 * at
        if place == "tf_crop_and_resize":
            first, last = self.roi
            if self.width == 1:
                return 0 * at + (first + last) * (self.have - 1) / 2
            return first * (self.have - 1) + at * (last - first) * (self.have - 1) / (self.width - 1)
        if place == "pytorch_half_pixel" and self.width == 1:
            return 0 * at
        centred = (at + 0.5) / self.scale - 0.5
        if place == "half_pixel_symmetric":
            # A result cut off to whole elements keeps the picture's middle.
            return centred + self.have / 2 * (1 - self.want / self.width)
        if place not in (HALF_PIXEL, "pytorch_half_pixel"):
            raise NotImplementedError(f"resizing with coordinates {place!r}")
        return centred


@onnx_spelling("Resize", "Upsample")
def _onnx_resize(g: Any, x: Any, attrs: Any) -> Any:
    old = attrs["opset"] < 11
    place = attrs.get("coordinate_transformation_mode", "asymmetric" if old else HALF_PIXEL)
    rounding = attrs.get("nearest_mode", "floor" if old else "round_prefer_floor")
    mode = attrs.get("mode", "nearest")
    dims = _dims(x, attrs, place)
    if place != "tf_crop_and_resize" and all(d.have == d.want and d.scale == 1 for d in dims):
        return x[0]
    known = _as_torch_has_it(g, x[0], dims, mode, place, rounding, attrs)
    if known is not None:
        return known
    if mode != "nearest" and "float" not in x[0].type.dtype:
        raise NotImplementedError(f"an interpolation of {x[0].type.dtype}")
    y = x[0]
    for dim in dims:
        positions = dim.positions(place)
        if mode == "nearest":
            ids = np.clip(_ROUNDED[rounding](positions), 0, dim.have - 1).astype(np.int64)
            y = g.emit("take", y, x.constant(ids), axis=dim.axis) if ids.tolist() != list(range(dim.have)) else y
        else:
            y = _weighed(g, x, y, dim.axis, _weights(dim, positions, mode, attrs))
    if place != "tf_crop_and_resize":
        return y
    return _extrapolated(g, x, y, dims, attrs.get("extrapolation_value", 0.0))


def _dims(x: Any, attrs: Mapping[str, Any], place: str) -> list[_Dim]:
    """The dims to resize, those that keep their size left out where that changes nothing."""
    have, rank = x[0].type.shape, len(x[0].type.shape)
    old = attrs["opset"] < 11
    axes = [a % rank for a in attrs.get("axes", range(rank))]
    sizes = None if old else x.numbers(3)
    if sizes:
        exact = [size / have[a] for a, size in zip(axes, sizes, strict=True)]
        policy = attrs.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = (min if policy == "not_larger" else max)(exact)
            exact = [one] * len(axes)
            sizes = [math.floor(have[a] * one + 0.5) for a in axes]
    else:
        exact = attrs.get("scales") or x.numbers(1 if old else 2)
        sizes = [math.floor(have[a] * scale) for a, scale in zip(axes, exact, strict=True)]
    roi = x.numbers(1) if place == "tf_crop_and_resize" else [0.0] * len(axes) + [1.0] * len(axes)
    found = [
        _Dim(axis, have[axis], int(sizes[i]), float(exact[i]), (roi[i], roi[i + len(axes)]))
        for i, axis in enumerate(axes)
    ]
    return [d for d in found if (d.have, d.scale, d.roi) != (d.want, 1.0, (0.0, 1.0))]


def _as_torch_has_it(
    g: Any, x: Any, dims: Sequence[_Dim], mode: str, place: str, rounding: str, attrs: Mapping[str, Any]
) -> Any:
    """The resizing of spatial dims as an op of torch's; None where there is no such op."""
    wanted = list(x.type.shape)
    for dim in dims:
        wanted[dim.axis] = dim.want
        if dim.axis < 2 or dim.have * dim.scale != dim.want:
            return None
    have, target = x.type.shape[2:], tuple(wanted[2:])
    if mode == "nearest":
        repeats = (place, rounding) in _REPEATS and not any(m % n for n, m in zip(have, target, strict=True))
        return upsample_nearest(g, x, target) if repeats else None
    if attrs.get("antialias") or attrs.get("cubic_coeff_a", -0.75) != -0.75 or attrs.get("exclude_outside"):
        return None
    if place not in (HALF_PIXEL, "pytorch_half_pixel", ALIGN_CORNERS) or (
        place == "pytorch_half_pixel" and 1 in target
    ):
        return None
    if not 1 <= len(have) <= (2 if mode == "cubic" else 3) or "float" not in x.type.dtype:
        return None
    return resize(g, x, target, mode, ALIGN_CORNERS if place == ALIGN_CORNERS else HALF_PIXEL)


def _linear(distance: Array, coefficient: float) -> Array:
    triangle: Array = np.maximum(0.0, 1 - np.abs(distance))
    return triangle


def _cubic(distance: Array, a: float) -> Array:
    """Cubic convolution: Keys, IEEE Transactions on Acoustics, Speech and Signal Processing 29(6), 1981."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


_KERNELS = {"linear": (_linear, 1), "cubic": (_cubic, 2)}


def _weights(dim: _Dim, positions: Array, mode: str, attrs: Mapping[str, Any]) -> Array:
    """The weight of each element of the operand (column) in each of the result (row)."""
    kernel, reach = _KERNELS[mode]
    # Where a picture shrinks, an antialiasing kernel is as wide as what becomes one element.
    narrowing = min(1.0, dim.scale) if attrs.get("antialias") else 1.0
    wide = math.ceil(reach / narrowing)
    matrix = np.zeros((dim.want, dim.have))
    for row, position in zip(matrix, positions, strict=True):
        taps = np.arange(math.floor(position) - wide, math.floor(position) + wide + 2)
        weights = kernel((taps - position) * narrowing, attrs.get("cubic_coeff_a", -0.75))
        if attrs.get("exclude_outside"):
            weights = np.where((taps >= 0) & (taps < dim.have), weights, 0.0)
        # An element beyond an edge is as the one at the edge.
        np.add.at(row, np.clip(taps, 0, dim.have - 1), weights / weights.sum())
    return matrix


def _weighed(g: Any, x: Any, y: Any, axis: int, matrix: Array) -> Any:
    """`y` with dim `axis` multiplied by the matrix."""
    rank = len(y.type.shape)
    weights = x.constant(np.ascontiguousarray(matrix.T).astype(y.type.dtype))
    if axis == rank - 1:
        return g.emit("matmul", y, weights)
    order = (*(d for d in range(rank) if d != axis), axis)
    y = g.emit("matmul", g.emit("permute_dims", y, axes=order), weights)
    return g.emit("permute_dims", y, axes=tuple(map(order.index, range(rank))))


def _extrapolated(g: Any, x: Any, y: Any, dims: Sequence[_Dim], value: float) -> Any:
    """`y`, with `value` where an element lies outside the operand."""
    outside: Any = np.zeros([1] * len(y.type.shape), dtype=bool)
    for dim in dims:
        positions = dim.positions("tf_crop_and_resize")
        shape = [dim.want if d == dim.axis else 1 for d in range(len(y.type.shape))]
        outside = outside | ((positions < 0) | (positions > dim.have - 1)).reshape(shape)
    return g.emit("where", x.constant(outside), g.constant(value, y.type.dtype), y)
