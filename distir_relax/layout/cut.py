"""Cuts: the division of a dim along one mesh axis into shard sizes, in one or several segments.

``S[1: 3*(384|384)]`` has one segment that is repeated: a fused QKV weight of 2304 columns whose three parts are each
cut in two, so that a device holds three slices, not one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from distir_relax.layout.symbolic_size import (
    SymbolicSize,
    UndecidedSize,
    floor_divide,
    is_always,
    is_symbolic,
    maximum,
    minimum,
    total,
)

Interval = tuple[int, int]
"""The elements [start, stop) of a dim."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`repeat` equal parts of a dim, each split into `sizes` elements, one for each index along the mesh axis."""

    repeat: int
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """`repeat`, as a number. Raises `UndecidedSize` for a symbolic one."""
        if isinstance(self.repeat, SymbolicSize):
            raise UndecidedSize(f"the sizes {self} interleave a number of parts that varies at run time")
        return self.repeat

    def __str__(self) -> str:
        sizes = "|".join(map(_print_unit, self.sizes))
        return sizes if self.repeat == 1 else f"{_print_unit(self.repeat)}*({sizes})"


@dataclass(frozen=True, slots=True)
class Cut:
    """The division of a dim along one mesh axis: its segments in order."""

    segments: tuple[Segment, ...]
    # Cached: layouts are dictionary keys in hot loops.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.segments))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, *sizes: int) -> Cut:
        """Return a cut of one segment with the given sizes."""
        return cls((Segment(1, sizes),))

    @property
    def ranks(self) -> int:
        """The number of shards."""
        return len(self.segments[0].sizes)

    @property
    def total(self) -> int:
        """The number of elements of the whole dim."""
        return total(s.repeat * total(s.sizes) for s in self.segments)

    @property
    def is_block(self) -> bool:
        """Whether every shard is one contiguous block."""
        return len(self.segments) == 1 and self.segments[0].repeat == 1

    @property
    def interleaved(self) -> Segment | None:
        """The parts of a cut that interleaves a symbolic number of them; None for other cuts."""
        return next((segment for segment in self.segments if is_symbolic(segment.repeat)), None)

    def along_parts(self, parts: Segment) -> tuple[int, Cut] | None:
        """Return the cut of a matrix that has `parts` of the dim as its rows: (0, rows) or (1, columns).

        Returns None if it is neither.
        """
        (first, *others), width = self.segments, total(parts.sizes)
        if not others and first.repeat == parts.repeat and total(first.sizes) == width:
            return 1, Cut.of(*first.sizes)
        if not others and first.repeat == 1 and is_always(0, "<", width):
            rows = [floor_divide(size, width) for size in first.sizes]
            if all(n * width == size for n, size in zip(rows, first.sizes, strict=True)):
                return 0, Cut.of(*rows)
        return None

    def local_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each index along the axis."""
        return _local_sizes(self)

    def intervals(self, index: int) -> list[Interval]:
        """Return the intervals [start, stop) of the dim on `index`, in order; adjacent ones are merged."""
        return list(_intervals(self)[index]) if self.segments else []

    def __str__(self) -> str:
        return " + ".join(map(str, self.segments))


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Intersect two sorted lists of disjoint intervals. Symbolic ones may be empty for some values."""
    if is_symbolic((*first, *second)):
        return _intersect_symbolic(first, second)
    result: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            result.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def _intersect_symbolic(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    result = []
    for a, b in product(first, second):
        if a == b:
            result.append(a)
            continue
        start = maximum(a[0], b[0])
        # No more than the end of the common part, and no less than its start.
        stop = maximum(start, minimum(a[1], b[1]))
        if is_always(stop, "<=", start) is not True:
            result.append((start, stop))
    return result


def _print_unit(size: int) -> str:
    """Print a size such that ``+``, ``|`` and ``*`` after it are not part of it."""
    return f"({size})" if isinstance(size, SymbolicSize) and not str(size).isidentifier() else str(size)


@lru_cache(maxsize=1024)
def _local_sizes(cut: Cut) -> tuple[int, ...]:
    return tuple(sum(s.repeat * s.sizes[i] for s in cut.segments) for i in range(cut.ranks))


@lru_cache(maxsize=1024)
def _intervals(cut: Cut) -> tuple[tuple[Interval, ...], ...]:
    """Return the intervals of every index of a cut. Raises `UndecidedSize` for a symbolic number of them."""
    intervals: list[list[Interval]] = [[] for _ in range(cut.ranks)]
    start = 0
    for segment in cut.segments:
        for _ in range(segment.count):
            for interval_list, width in zip(intervals, segment.sizes, strict=True):
                if width != 0 and interval_list and interval_list[-1][1] == start:
                    interval_list[-1] = (interval_list[-1][0], start + width)
                elif width != 0:
                    interval_list.append((start, start + width))
                start += width
    return tuple(map(tuple, intervals))
