"""Sliding windows: the dependence of a result dim on an operand dim, by exact interval arithmetic.

Most windows follow a stride (`StridedWindow`); those of resizing and of adaptive pooling follow a formula
(`SampledWindow`), those of repeated elements their numbers (`RepeatWindow`), and those of a tensor to which others are
appended are its elements (`PrefixWindow`). A strided *gathering* window (convolution, pooling) reads, for result
element `o`, the positions ``o*stride - low + dilation*j`` for `j` in `range(kernel)`. A *scattering* one (transposed
convolution, upsampling) writes, for operand element `i`, the positions ``i*stride - low + dilation*j``. Positions
outside the operand are padding; `low` and `high` elements are cropped from the ends of a scattering window's result (or
added, when negative).

The size of the result follows from the size of the operand and the padding at both ends::

    gathering   (n + low + high - extent) // stride + 1
    scattering  (n - 1) * stride + extent - low - high

A device that computes the result elements [start, stop) fetches the interval `reads(start, stop)` of the operand as
halo, and runs the same op on it with the padding of `part(start, stop)`: what remains of the original padding at the
ends of the dim, and for a scattering window also the crop to its own result elements.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from distir_relax.kernels.sampling import Sampling, Taps, taps_of
from distir_relax.layout import minimum

GATHER, SCATTER = "gather", "scatter"


@dataclass(frozen=True, slots=True)
class _Dims:
    """Dim `operand_dim`, of `size` elements, of operand number `operand` feeds dim `result_dim` of result 0.

    `index` is the window's index among the op's spatial dims.
    """

    index: int
    operand: int
    operand_dim: int
    result_dim: int
    size: int


@dataclass(frozen=True, slots=True)
class StridedWindow(_Dims):
    """A window with a stride; `kind` is ``gather`` or ``scatter``. Its parts are parameterized by their padding."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0
    kind: str = GATHER

    @property
    def extent(self) -> int:
        """The positions from the first to the last element of the kernel."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def result_size(self) -> int:
        """The size of the result dim. Raises ValueError for an invalid window, or one larger than the operand."""
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise ValueError(f"a window has kernel, stride and dilation of at least 1, found {self}")
        size = self.sized(self.size, self.low, self.high)
        if size < 0:
            raise ValueError(
                f"a kernel that covers {self.extent} of a dim of {self.size} with padding {self.low}, {self.high}"
            )
        return size

    @property
    def reach(self) -> int:
        """The number of further elements that one element of the result may need besides its own."""
        return self.extent - 1

    @property
    def is_plain(self) -> bool:
        """Whether each result element depends only on the element at its position, so that no window is needed."""
        return (self.kernel, self.stride, self.low, self.high) == (1, 1, 0, 0)

    def __str__(self) -> str:
        return f"kernel {self.kernel}, stride {self.stride}, dilation {self.dilation}"

    def sized(self, size: int, low: int, high: int) -> int:
        """Return the size of the result dim for an operand of `size` elements and the given padding."""
        if self.kind == SCATTER:
            return (size - 1) * self.stride + self.extent - low - high
        return (size + low + high - self.extent) // self.stride + 1

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Return the operand interval that the result elements [start, stop) depend on; (0, 0) if empty."""
        if self.kind == SCATTER:
            first = -(-(start + self.low - self.extent + 1) // self.stride)
            last = (stop - 1 + self.low) // self.stride + 1
        else:
            first = start * self.stride - self.low
            last = (stop - 1) * self.stride - self.low + self.extent
        first, last = max(first, 0), min(last, self.size)
        return (first, last) if start < stop and first < last else (0, 0)

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Return the padding at both ends to compute result elements [start, stop) from `reads(start, stop)` alone."""
        first, last = self.reads(start, stop)
        count, width = stop - start, last - first
        if self.kind == SCATTER:
            low = start + self.low - first * self.stride if width else 0
            return low, (width - 1) * self.stride + self.extent - low - count
        if not count:
            return self.extent - 1, 0
        begin = start * self.stride - self.low
        span = (count - 1) * self.stride + self.extent
        low = first - begin if width else span
        return low, span - low - width


@dataclass(frozen=True, slots=True)
class SampledWindow(_Dims):
    """A window with the positions of `sampling` for `dtype`. Its parts are parameterized by their offsets."""

    result_size: int
    sampling: Sampling
    dtype: str
    is_plain: bool = False

    @property
    def reach(self) -> int:
        """The number of further elements that one element of the result may need besides its own."""
        positions = self._taps().positions
        return int((positions.max(axis=1) - positions.min(axis=1)).max(initial=0)) if self.size else 0

    def __str__(self) -> str:
        return f"{self.size} elements to {self.result_size}, {self.sampling}"

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Return the operand interval that the result elements [start, stop) depend on; (0, 0) if empty."""
        if start >= stop or not self.size:
            return 0, 0
        positions = self._taps().positions[start:stop]
        return int(positions.min()), int(positions.max()) + 1

    def part(self, start: int, stop: int) -> tuple[int, ...]:
        """Return operand size, first operand element, result size and first result element of [start, stop)."""
        return self.size, self.reads(start, stop)[0], self.result_size, start

    def _taps(self) -> Taps:
        return taps_of(self.sampling, self.size, self.result_size, self.dtype == "float64")


@dataclass(frozen=True, slots=True)
class RepeatWindow(_Dims):
    """The window of elements that are repeated, element `i` of them `repeats[i]` times in a row.

    Its parts are parameterized by the interval of the result.
    """

    repeats: tuple[int, ...]
    is_plain: bool = False

    @property
    def result_size(self) -> int:
        """The size of the result dim."""
        return sum(self.repeats)

    @property
    def reach(self) -> int:
        """The number of further elements that one element of the result may need besides its own."""
        return 0

    def __str__(self) -> str:
        return f"repeats {' '.join(map(str, self.repeats))}"

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Return the operand interval that the result elements [start, stop) are copies of; (0, 0) if empty."""
        if start >= stop:
            return 0, 0
        ends = list(accumulate(self.repeats))
        return bisect_right(ends, start), bisect_left(ends, stop) + 1

    def part(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the interval of the result elements."""
        return start, stop


@dataclass(frozen=True, slots=True)
class PrefixWindow(_Dims):
    """The window of a dim whose elements are the first ones of the result; sizes may be symbolic.

    Its parts are parameterized by the first of the appended elements that belong to them, and their number.
    """

    result_size: int
    reach = 0
    is_plain = False

    def __str__(self) -> str:
        return "first elements of the result"

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Return the operand interval that is in the result elements [start, stop)."""
        return minimum(start, self.size), minimum(stop, self.size)

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first of the appended elements in the result elements [start, stop), and their number."""
        first, last = self.reads(start, stop)
        return start - first, stop - last - (start - first)


Window = StridedWindow | SampledWindow | RepeatWindow | PrefixWindow
"""`reads` and `part` are the interface of halo exchange; `Split.windowed` turns `part` into attributes of the op."""
