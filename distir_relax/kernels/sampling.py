"""Which elements of a dim each element of another is made from, and how much each counts: resizing and pooling.

A `Sampling` is a formula; what it gives for two sizes are `Taps`. The compiler reads there what devices must send
each other, and a rank's program what it computes, so the two cannot disagree.
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
    """For each element of the result (a row): the positions it is made from, and the weights of those.

    `positions` and `weights` are of shape (elements of the result, taps); no weights where nothing is weighed.
    """

    positions: Numbers
    weights: Floats | None = None


class Sampling(Protocol):
    """How elements of one dim are made from those of another, whatever the sizes. Hashable."""

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """The taps from a dim of `have` elements to one of `want`; `precise` where the data is of 64 bits."""

    def __hash__(self) -> int: ...


@lru_cache(maxsize=1024)
def taps_of(sampling: Sampling, have: int, want: int, precise: bool) -> Taps:
    """`sampling.taps`, remembered."""
    return sampling.taps(have, want, precise)


@dataclass(frozen=True)
class Adaptive:
    """Windows that divide the dim as evenly as may be: element `i` of `m` is made from those between ``floor(i n / m)``
    and ``ceil((i + 1) n / m)``. The weights are those of their average.

    Shorter windows repeat their last element, which changes no maximum; it shares its weight, since a weight of zero
    would make an infinite element no number.
    """

    def __str__(self) -> str:
        return "adaptive"

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """See `Sampling.taps`."""
        at = np.arange(want)
        start, stop = at * have // want, -(-(at + 1) * have // want)
        length = (stop - start)[:, None]
        taps = np.arange(length.max(initial=1))
        positions = np.minimum(start[:, None] + taps, stop[:, None] - 1)
        repeats = np.maximum(1, len(taps) - length + 1)
        weights = np.where(taps < length - 1, 1.0, 1.0 / repeats) / length
        return Taps(positions, weights)


@dataclass(frozen=True)
class Pooling:
    """Windows of `kernel` elements that are `dilation` apart, beginning `stride` apart, the first `low` before the dim.

    What lies outside the dim is left out: the window repeats an element in its place.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0

    def __str__(self) -> str:
        return f"kernel {self.kernel}, stride {self.stride}, dilation {self.dilation}"

    def taps(self, have: int, want: int, precise: bool) -> Taps:
        """See `Sampling.taps`. Raises ValueError for a window that holds no element of the dim."""
        begin = np.arange(want)[:, None] * self.stride - self.low
        first = -(np.minimum(begin, 0) // self.dilation)
        last = np.minimum(self.kernel - 1, (have - 1 - begin) // self.dilation)
        if (first > last).any():
            raise ValueError("a window of padding alone, which has no largest element")
        taps = np.clip(np.arange(self.kernel), first, last)
        return Taps(begin + taps * self.dilation)


@dataclass(frozen=True)
class Resizing:
    """Resizing of one dim, as torch has it, or, where `scale` is given, as ONNX has it (operator Resize, version 19).

    `method` is ``nearest_neighbor``, ``linear`` or ``cubic``; `place` is how a position in the result is taken back to
    the operand: ``half_pixel``, ``align_corners``, ``asymmetric``, and ONNX's ``pytorch_half_pixel``,
    ``half_pixel_symmetric`` and ``tf_crop_and_resize``, which resizes the part `roi` of the dim. `rounding` is
    ``floor``, ``ceil``, ``round_prefer_floor`` or ``round_prefer_ceil``. With `antialias`, a kernel is as wide as what
    becomes one element; with `exclude_outside`, what lies beyond an edge has no weight, else it is as the edge.

    torch computes positions in the type of the data, and those of the nearest elements always in 32 bits.
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
            rounded = np.clip(_ROUNDED[self.rounding](positions), 0, have - 1)
            return Taps(rounded.astype(np.int64)[:, None])
        return self._weighed(positions, have)

    def places(self, have: int, want: int) -> Floats:
        """Where each element of the result lies in the operand, elements being 1 apart, as ONNX has it."""
        at = np.arange(want, dtype=np.float64)
        assert self.scale is not None
        # The size of the result before it is cut off to whole elements.
        exact = self.scale * have
        width = float(want) if math.isclose(exact, want) else exact
        if self.place == ASYMMETRIC:
            return at / self.scale
        if self.place == ALIGN_CORNERS:
            return at * (have - 1) / (width - 1) if width != 1 else 0 * at
        if self.place == CROP:
            first, last = self.roi
            if width == 1:
                return 0 * at + (first + last) * (have - 1) / 2
            return first * (have - 1) + at * (last - first) * (have - 1) / (width - 1)
        if self.place == "pytorch_half_pixel" and width == 1:
            return 0 * at
        centred = (at + 0.5) / self.scale - 0.5
        if self.place == "half_pixel_symmetric":
            # A result cut off to whole elements keeps the picture's middle.
            return centred + have / 2 * (1 - want / width)
        return centred

    def _as_torch(self, have: int, want: int, number: Any) -> Floats:
        at = np.arange(want, dtype=number)
        if self.place == ALIGN_CORNERS:
            step = number(have - 1) / number(want - 1) if want > 1 else number(0)
            positions = at * step
        elif self.place == ASYMMETRIC:
            positions = at * (number(have) / number(want))
        else:
            # Of 32 bits, product and difference are rounded once, as processors that fuse them do.
            step = np.float64(number(have) / number(want))
            positions = ((at + number(0.5)).astype(np.float64) * step - 0.5).astype(number)
        found: Floats = positions.astype(np.float64)
        return found

    def _weighed(self, positions: Floats, have: int) -> Taps:
        kernel, reach = _KERNELS[self.method]
        assert self.scale is not None or not self.antialias
        narrowing = min(1.0, self.scale) if self.antialias and self.scale else 1.0
        support = reach / narrowing
        first = np.floor(positions - support)[:, None] + 1
        taps = first + np.arange(math.ceil(2 * support))
        weights = kernel((taps - positions[:, None]) * narrowing, self.cubic_coefficient)
        if self.exclude_outside:
            weights = np.where((taps >= 0) & (taps < have), weights, 0.0)
        return Taps(np.clip(taps, 0, have - 1).astype(np.int64), weights / weights.sum(axis=1, keepdims=True))


_ROUNDED: dict[str, Callable[[Floats], Floats]] = {
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
