"""Resizing and pooling formulas: the elements of a dim that each element of the result depends on, and their weights.

A `Sampling` is a formula; for two sizes it gives `Taps`. The compiler derives from them the rows that devices exchange,
and a rank's program its computation, so the two are consistent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

NEAREST, LINEAR, CUBIC = "nearest_neighbor", "linear", "cubic"
HALF_PIXEL, ALIGN_CORNERS, ASYMMETRIC = "half_pixel", "align_corners", "asymmetric"
CROP = "tf_crop_and_resize"


@dataclass(frozen=True)
class Taps:
    """For each element of the result (a row): the positions of the elements that it depends on, and their weights.

    `positions` and `weights` have shape (elements of the result, taps); `weights` is None for unweighted windows.
    """

    positions: Numbers
    weights: Floats | None = None


class Sampling(Protocol):
    """Formula for resampling a dim, independent of sizes. Hashable."""

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """Return the taps from a dim of `have` elements to one of `want`; `precise` for 64-bit data."""

    def __hash__(self) -> int: ...


@lru_cache(maxsize=1024)
def taps_of(sampling: Sampling, have: int, want: int, precise: bool) -> Taps:
    """Return `sampling.taps`, cached."""
    return sampling.taps(have, want, precise)


@dataclass(frozen=True)
class Adaptive:
    """Windows that divide the dim as evenly as possible: element `i` of `m` depends on those from ``floor(i n / m)``
    to ``ceil((i + 1) n / m)``. The weights are those of their average.

    Shorter windows repeat their last element, which does not affect a maximum; the weight is divided among repetitions,
    since a zero weight times an infinite element would be NaN.
    """

    def __str__(self) -> str:
        return "adaptive"

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """See `Sampling.taps`."""
        index = np.arange(want)
        start, stop = index * have // want, -(-(index + 1) * have // want)
        length = (stop - start)[:, None]
        taps = np.arange(length.max(initial=1))
        positions = np.minimum(start[:, None] + taps, stop[:, None] - 1)
        repeats = np.maximum(1, len(taps) - length + 1)
        weights = np.where(taps < length - 1, 1.0, 1.0 / repeats) / length
        return Taps(positions, weights)


@dataclass(frozen=True)
class Pooling:
    """Windows of `kernel` elements, `dilation` apart, starting `stride` apart, the first `low` elements before the dim.

    Elements outside of the dim are ignored: the window repeats an element instead.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0

    def __str__(self) -> str:
        return f"kernel {self.kernel}, stride {self.stride}, dilation {self.dilation}"

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """See `Sampling.taps`. Raises ValueError for a window without elements of the dim."""
        begin = np.arange(want)[:, None] * self.stride - self.low
        first = -(np.minimum(begin, 0) // self.dilation)
        last = np.minimum(self.kernel - 1, (have - 1 - begin) // self.dilation)
        if (first > last).any():
            raise ValueError("a window contains only padding, which has no maximum")
        taps = np.clip(np.arange(self.kernel), first, last)
        return Taps(begin + taps * self.dilation)


@dataclass(frozen=True)
class Resizing:
    """Resizing of one dim, as in torch, or, with `scale`, as in ONNX (operator Resize, version 19).

    `method` is ``nearest_neighbor``, ``linear`` or ``cubic``; `place` is the mapping of positions in the result to the
    operand: ``half_pixel``, ``align_corners``, ``asymmetric``, and ONNX's ``pytorch_half_pixel``,
    ``half_pixel_symmetric`` and ``tf_crop_and_resize``, which resizes the part `roi` of the dim. `rounding` is
    ``floor``, ``ceil``, ``round_prefer_floor`` or ``round_prefer_ceil``. With `antialias`, the kernel is widened when
    downsampling; with `exclude_outside`, positions beyond an edge have no weight, else they repeat the edge.

    torch computes positions in the type of the data, and nearest positions always in 32 bits.
    """

    method: str
    place: str
    scale: float | None = None
    rounding: str = "floor"
    roi: tuple[float, float] = (0.0, 1.0)
    cubic_coefficient: float = -0.75
    antialias: bool = False
    exclude_outside: bool = False

    def __str__(self) -> str:
        return f"{self.method}, {self.place}"

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """See `Sampling.taps`."""
        if self.scale is None:
            positions = self._as_torch(have, want, np.float64 if precise and self.method != NEAREST else np.float32)
        else:
            positions = self.places(have, want)
        if self.method == NEAREST:
            rounded = np.clip(_ROUNDING[self.rounding](positions), 0, have - 1)
            return Taps(rounded.astype(np.int64)[:, None])
        return self._weighted_taps(positions, have)

    def places(self, have: int, want: int) -> Floats:
        """Return the position in the operand of each element of the result, as in ONNX."""
        index = np.arange(want, dtype=np.float64)
        assert self.scale is not None
        # The size of the result before rounding to an integer.
        exact_size = self.scale * have
        result_size = float(want) if math.isclose(exact_size, want) else exact_size
        if self.place == ASYMMETRIC:
            return index / self.scale
        if self.place == ALIGN_CORNERS:
            return index * (have - 1) / (result_size - 1) if result_size != 1 else 0 * index
        if self.place == CROP:
            first, last = self.roi
            if result_size == 1:
                return 0 * index + (first + last) * (have - 1) / 2
            return first * (have - 1) + index * (last - first) * (have - 1) / (result_size - 1)
        if self.place == "pytorch_half_pixel" and result_size == 1:
            return 0 * index
        centered = (index + 0.5) / self.scale - 0.5
        if self.place == "half_pixel_symmetric":
            # A result of rounded size stays centered.
            return centered + have / 2 * (1 - want / result_size)
        return centered

    def _as_torch(self, have: int, want: int, number: Any) -> Floats:
        index = np.arange(want, dtype=number)
        if self.place == ALIGN_CORNERS:
            step = number(have - 1) / number(want - 1) if want > 1 else number(0)
            positions = index * step
        elif self.place == ASYMMETRIC:
            positions = index * (number(have) / number(want))
        else:
            # In 32 bits, product and difference are rounded once, as with fused multiply-add.
            step = np.float64(number(have) / number(want))
            positions = ((index + number(0.5)).astype(np.float64) * step - 0.5).astype(number)
        result: Floats = positions.astype(np.float64)
        return result

    def _weighted_taps(self, positions: Floats, have: int) -> Taps:
        kernel, reach = _KERNELS[self.method]
        assert self.scale is not None or not self.antialias
        kernel_scale = min(1.0, self.scale) if self.antialias and self.scale else 1.0
        support = reach / kernel_scale
        first = np.floor(positions - support)[:, None] + 1
        taps = first + np.arange(math.ceil(2 * support))
        weights = kernel((taps - positions[:, None]) * kernel_scale, self.cubic_coefficient)
        if self.exclude_outside:
            weights = np.where((taps >= 0) & (taps < have), weights, 0.0)
        return Taps(np.clip(taps, 0, have - 1).astype(np.int64), weights / weights.sum(axis=1, keepdims=True))


_ROUNDING: dict[str, Callable[[Floats], Floats]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _linear(distance: Floats, coefficient: float) -> Floats:
    triangle: Floats = np.maximum(0.0, 1 - np.abs(distance))
    return triangle


def _cubic(distance: Floats, a: float) -> Floats:
    """Cubic convolution: Keys, IEEE Transactions on Acoustics, Speech and Signal Processing 29(6), 1981."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


_KERNELS = {LINEAR: (_linear, 1), CUBIC: (_cubic, 2)}
