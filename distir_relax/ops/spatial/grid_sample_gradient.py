"""Gradient of grid sampling, nearest and bilinear.

Decomposed into ops of the table: each element that a position reads has a weight. The image's gradient is a sum by
these weights, and their slopes give the gradient of the position. Bicubic sampling has no gradient here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Value
from distir_relax.ops.table import Backward, broadcast_to, cast, reshape_to


@dataclass(frozen=True)
class _Tap:
    """One of the elements that a position reads along a dim: its index, its weight, and the slope of the weight."""

    index: Value
    weight: Value
    slope: Value


def differentiate_grid_sample(b: Backward) -> tuple[Value, Value]:
    """Return the gradients of the image and of the grid. Raises `UnsupportedOpError` for bicubic sampling."""
    if b.attrs["method"] not in ("bilinear", "nearest"):
        raise UnsupportedOpError(
            f"{b.op.name} by {b.attrs['method']!r} has no gradient; expected 'bilinear' or 'nearest'",
            b.op.location,
            "read the image by one of these, or leave what depends on it out of the loss",
        )
    n, c, h, w = b.x().tensor.shape
    count = b.grad.tensor.shape[2] * b.grad.tensor.shape[3]
    grad, image = reshape_to(b.g, b.grad, (n, c, count)), reshape_to(b.g, b.x(), (n, c, h * w))
    across, down = _taps(b, 0, w), _taps(b, 1, h)
    of_image = broadcast_to(b.g, b.number(0.0), (n, c, h * w))
    slopes: list[list[Value]] = [[], []]
    for i, j in itertools.product(across, down):
        row = b.emit("multiply", j.index, b.g.constant(w, "int64"))
        place = broadcast_to(b.g, reshape_to(b.g, b.emit("add", row, i.index), (n, 1, count)), (n, c, count))
        weight = reshape_to(b.g, b.emit("multiply", i.weight, j.weight), (n, 1, count))
        share = b.emit("multiply", grad, weight)
        of_image = b.emit("scatter_elements", of_image, place, share, axis=2, reduction="add")
        products = b.emit("multiply", grad, b.emit("gather_elements", image, place, axis=2))
        along = b.emit("sum", products, axis=(1,), keepdims=False)
        slopes[0].append(b.emit("multiply", along, b.emit("multiply", i.slope, j.weight)))
        slopes[1].append(b.emit("multiply", along, b.emit("multiply", i.weight, j.slope)))
    of_grid = [reshape_to(b.g, _total(b, parts), (*b.x(1).tensor.shape[:-1], 1)) for parts in slopes]
    return reshape_to(b.g, of_image, (n, c, h, w)), b.emit("concat", *of_grid, axis=3)


def _total(b: Backward, parts: list[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = b.emit("add", total, part)
    return total


def _taps(b: Backward, which: int, size: int) -> list[_Tap]:
    """Return the elements of a dim of `size` that coordinate `which` of each position reads, each (n, positions)."""
    n, rows, columns, _ = b.x(1).tensor.shape
    coordinate = b.emit("strided_slice", b.x(1), axes=(3,), begin=(which,), end=(which + 1,), strides=(1,))
    place, slope = _pixel_position(b, reshape_to(b.g, coordinate, (n, rows * columns)), size)
    one, none = b.number(1.0), b.emit("multiply", place, b.number(0.0))
    if b.attrs["method"] == "nearest":
        return [_inside(b, b.emit("round", place), b.emit("add", none, one), none, size)]
    first = b.emit("floor", place)
    rest = b.emit("subtract", place, first)
    return [
        _inside(b, first, b.emit("subtract", one, rest), b.emit("negative", slope), size),
        _inside(b, b.emit("add", first, one), rest, slope, size),
    ]


def _inside(b: Backward, place: Value, weight: Value, slope: Value, size: int) -> _Tap:
    """Return the tap at an index; outside the image its weight is zero."""
    nearest = b.emit("clip", place, min=0.0, max=float(size - 1))
    inside = cast(b.g, b.emit("equal", place, nearest), weight.tensor.dtype)
    weight, slope = (b.emit("multiply", x, inside) for x in (weight, slope))
    return _Tap(cast(b.g, nearest, "int64"), weight, slope)


def _pixel_position(b: Backward, coordinate: Value, size: int) -> tuple[Value, Value]:
    """Map [-1, 1] to indices into a dim of `size`, with the slope (ATen's `grid_sampler_compute_source`)."""
    aligned, how = b.attrs["align_corners"], b.attrs["padding_mode"]
    half = (size - 1 if aligned else size) / 2
    place = b.emit("add", b.emit("multiply", coordinate, b.number(half)), b.number((size - 1) / 2))
    slope = b.emit("add", b.emit("multiply", coordinate, b.number(0.0)), b.number(half))
    if how == "reflection":
        low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
        place, slope = _reflect(b, place, slope, low, high)
    if how != "zeros":
        inside = b.emit(
            "logical_and", b.emit("greater", place, b.number(0.0)), b.emit("less", place, b.number(size - 1.0))
        )
        slope = b.emit("multiply", slope, cast(b.g, inside, slope.tensor.dtype))
        place = b.emit("clip", place, min=0.0, max=size - 1.0)
    return place, slope


def _reflect(b: Backward, place: Value, slope: Value, low: float, high: float) -> tuple[Value, Value]:
    """Reflect indices at `low` and `high`, as often as necessary."""
    if low == high:
        nothing = b.emit("multiply", place, b.number(0.0))
        return nothing, nothing
    span = b.number(high - low)
    beyond = b.emit("subtract", place, b.number(low))
    far = b.emit("abs", beyond)
    times = b.emit("floor", b.emit("divide", far, span))
    rest = b.emit("subtract", far, b.emit("multiply", times, span))
    even = b.emit("equal", b.emit("mod", times, b.number(2.0)), b.number(0.0))
    mirrored = b.emit("where", even, rest, b.emit("subtract", span, rest))
    sign = b.emit("where", b.emit("less", beyond, b.number(0.0)), b.number(-1.0), b.number(1.0))
    slope = b.emit("multiply", slope, b.emit("where", even, sign, b.emit("negative", sign)))
    return b.emit("add", mirrored, b.number(low)), slope
