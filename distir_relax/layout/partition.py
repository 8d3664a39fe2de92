"""Partitioning of a dim, in units of its factor class, and the resulting cuts of the dims of the class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm

from distir_relax.errors import PlacementError
from distir_relax.layout import Cut, Placement, Segment, Shard
from distir_relax.layout.symbolic_size import (
    UndecidedSize,
    balanced_part,
    generic_value,
    is_always,
    is_symbolic,
    minimum,
)

Divide = Callable[[int, int], tuple[int, ...]]
"""Returns shard sizes, given the size of a dim and the number of shards: `balanced`, `chunked`."""


def balanced(size: int, ranks: int) -> tuple[int, ...]:
    """Return sizes that differ by at most one, larger first: 12 heads on 5 devices are 3, 3, 2, 2, 2."""
    if is_symbolic(size):
        return tuple(balanced_part(size, ranks, i) for i in range(ranks))
    each, extra = divmod(size, ranks)
    return tuple(each + (i < extra) for i in range(ranks))


def chunked(size: int, ranks: int) -> tuple[int, ...]:
    """Return blocks of ``ceil(size / ranks)``, as torch and TVM do: 12 on 5 are 3, 3, 3, 3, 0."""
    block = (size + ranks - 1) // ranks
    ends = [minimum(size, i * block) for i in range(ranks + 1)]
    return tuple(b - a for a, b in pairwise(ends))


def proportional(size: int, shares: Sequence[float], limits: Sequence[int] = ()) -> tuple[int, ...]:
    """Return sizes that minimize the largest ``size / share``: devices of these speeds finish at the same time.

    12 by shares of 2 and 1 are 8, 4. Each is at least one if there are enough, and at most `limits` if those leave
    enough room; equal shares give the `balanced` sizes. A symbolic size is rounded at the ends of the shards.
    """
    if is_symbolic(size):
        return _proportional_symbolic(size, shares)
    if not limits and min(shares) == max(shares):
        return balanced(size, len(shares))
    min_size = int(size >= len(shares))
    limits = list(limits) if limits and sum(limits) >= size and min(limits) >= min_size else [size] * len(shares)

    def units_by(time: float) -> list[int]:
        """Return the number of units that each device completes by `time`, at a rate of its share."""
        return [min(max(int(time * s), min_size), n) for s, n in zip(shares, limits, strict=True)]

    low, high = 0.0, (size + 1) / min(shares)
    for _ in range(96):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(units_by(middle)) <= size else (low, middle)
    sizes = units_by(low)
    for _ in range(size - sum(sizes)):
        free = [i for i, n in enumerate(sizes) if n < limits[i]]
        next_ = min(free, key=lambda i: ((sizes[i] + 1) / shares[i], i))
        sizes[next_] += 1
    return tuple(sizes)


def _proportional_symbolic(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    if min(shares) == max(shares):
        return balanced(size, len(shares))
    weights = [max(1, round(_SHARE_UNITS * share / sum(shares))) for share in shares]
    ends = [size * end // sum(weights) for end in accumulate(weights, initial=0)]
    return tuple(b - a for a, b in pairwise(ends))


def in_multiples(size: int, multiple: int, divide: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
    """Return sizes of shards that begin at multiples: `divide` gives the numbers of `multiple` of each.

    50257 in two by 64 are 25152, 25105.
    """
    ends = accumulate(divide((size + multiple - 1) // multiple), initial=0)
    return tuple(b - a for a, b in pairwise([minimum(size, multiple * end) for end in ends]))


def partition_rule(placement: Shard, inner: int = 1) -> Divide:
    """Return the partition of a split without sizes: even, in blocks, or proportional to its shares.

    It divides units of `inner` elements each, which stay whole. Shards begin at multiples of elements, if requested,
    unless `inner` is symbolic.
    """
    if placement.chunk:
        return chunked
    is_free = placement.multiple == 1 or is_symbolic(inner)
    multiple = 1 if is_free else lcm(placement.multiple, inner) // inner

    def divide(size: int, ranks: int) -> tuple[int, ...]:
        return proportional(size, placement.shares) if placement.shares else balanced(size, ranks)

    return divide if multiple == 1 else lambda size, ranks: in_multiples(size, multiple, lambda n: divide(n, ranks))


_SHARE_UNITS = 60
"""The number of units that the shares of a symbolic size are rounded to."""


def scale_sizes(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return `size` in the proportions of `sizes`: 10 as 3, 2 is 6, 4."""
    total = sum(sizes)
    ends = [(2 * sum(sizes[:i]) * size + total) // (2 * total) for i in range(len(sizes) + 1)]
    return tuple(b - a for a, b in pairwise(ends))


def cut_in_units(cut: Cut, outer: int, size: int, inner: int, where: str) -> Cut:
    """Convert the cut of a dim of `outer` x `size` x `inner` elements to one of the `size` units of its class.

    The cut may list the `outer` parts of the dim separately (``3*(384|384)``) or together (``1152|1152``). Raises
    `PlacementError` if the sizes do not add up to the dim, or split a unit.
    """
    total = outer * size * inner
    if is_always(cut.total, "==", total) is False:
        raise PlacementError(f"the sizes {cut} add up to {cut.total}, the dim has {total}", where)
    parts = _split_segments(cut, size * inner)
    uniform = parts and all(s == parts[0] for s in parts)
    segments, unit_size = (parts[0], inner) if uniform else (list(cut.segments), outer * inner)
    if any(n % unit_size != 0 for s in segments for n in s.sizes):
        raise PlacementError(
            f"the sizes {cut} split units of {unit_size} elements, which must stay whole",
            where,
            f"give each device a multiple of {unit_size}",
        )
    return merge_segments(Segment(s.repeat, tuple(n // unit_size for n in s.sizes)) for s in segments)


def cut_in_elements(units: Cut, outer: int, inner: int) -> Cut:
    """Convert a cut in units to that of a dim of `outer` parts, whose units have `inner` elements each."""
    if outer == inner == 1:
        return units
    segments = [Segment(s.repeat, tuple(n * inner for n in s.sizes)) for s in units.segments]
    if len(segments) == 1:
        return Cut((Segment(outer * segments[0].repeat, segments[0].sizes),))
    if is_symbolic(outer):
        raise UndecidedSize(f"a cut repeats {units} {outer} times, a number that varies at run time")
    return merge_segments(segments * outer)


def refine_cut(size: int, others: Sequence[Cut], ranks: int, divide: Divide = balanced) -> Cut:
    """Return a cut of a dim of `size` elements that divides each shard of `others` separately."""
    bounds = {0, size}.union(*map(_bounds, others))
    return merge_segments(Segment(1, divide(b - a, ranks)) for a, b in pairwise(sorted(bounds, key=generic_value)))


@lru_cache(maxsize=4096)
def is_nested(first: Cut, second: Cut) -> bool:
    """Whether one of two cuts of a dim divides each shard of the other separately: ``4|3`` and ``2|2 + 2|1``."""
    if parts := first.interleaved or second.interleaved:
        a, b = first.along_parts(parts), second.along_parts(parts)
        return a is not None and b is not None and (a[0] != b[0] or is_nested(a[1], b[1]))
    return _divides(first, second) or _divides(second, first)


def reject_crossing(placements: Sequence[Placement], where: str) -> None:
    """Raise `PlacementError` if the sizes of one dim along two mesh axes are not nested."""
    sized = [p for p in placements if isinstance(p, Shard) and p.cut]
    for number, second in enumerate(sized):
        for first in sized[:number]:
            assert first.cut is not None
            assert second.cut is not None
            if first.dim == second.dim and not is_nested(first.cut, second.cut):
                valid_cut = refine_cut(first.cut.total, [first.cut], second.cut.ranks)
                raise PlacementError(
                    f"the sizes of {second} do not divide each part of {first} separately",
                    where,
                    f"list the sizes within each part: S[{second.dim}: {valid_cut}], or give no sizes: S[{second.dim}]",
                )


def merge_segments(segments: Iterable[Segment]) -> Cut:
    """Return the cut of these segments, with equal neighbors merged."""
    result: list[Segment] = []
    for segment in segments:
        if result and result[-1].sizes == segment.sizes:
            result[-1] = Segment(result[-1].repeat + segment.repeat, segment.sizes)
        else:
            result.append(segment)
    return Cut(tuple(result))


def _split_segments(cut: Cut, length: int) -> list[list[Segment]]:
    """Split the segments of a cut into parts of `length` elements; empty if a segment crosses parts."""
    parts: list[list[Segment]] = []
    remaining = 0
    for segment in cut.segments:
        width = sum(segment.sizes)
        if is_symbolic((width, segment.repeat, length)):
            return []
        for _ in range(segment.repeat if width else 0):
            if not remaining:
                parts.append([])
                remaining = length
            if width > remaining:
                return []
            parts[-1].append(Segment(1, segment.sizes))
            remaining -= width
    return parts


def _bounds(cut: Cut) -> set[int]:
    """Return the boundaries of the shards of a cut."""
    return set(accumulate(n for s in cut.segments for _ in range(s.count) for n in s.sizes))


def _divides(first: Cut, second: Cut) -> bool:
    """Whether no segment of `first` crosses shards of `second`."""
    ends = {0, *accumulate(sum(s.sizes) for s in first.segments for _ in range(s.count))}
    return _bounds(second) <= ends
