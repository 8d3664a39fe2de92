"""How the units of a class are divided between devices, and what that makes of each dim of the class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from distir_relax.errors import PlacementError
from distir_relax.layout import Cut, Placement, Segment, Shard

Divide = Callable[[int, int], tuple[int, ...]]
"""The sizes of a number of shards from the size of a dim and that number, as `balanced` and `chunked` say them."""


def balanced(size: int, ranks: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger first: 12 heads on 5 devices are 3, 3, 2, 2, 2."""
    each, extra = divmod(size, ranks)
    return tuple(each + (i < extra) for i in range(ranks))


def chunked(size: int, ranks: int) -> tuple[int, ...]:
    """Blocks of ``ceil(size / ranks)`` until none is left, as torch and TVM cut: 12 on 5 are 3, 3, 3, 3, 0."""
    block = -(-size // ranks)
    return tuple(max(0, min(block, size - i * block)) for i in range(ranks))


def proportional(size: int, shares: Sequence[float], most: Sequence[int] = ()) -> tuple[int, ...]:
    """Sizes that keep devices of these speeds busy for as long: the largest ``size / share`` is least.

    12 by shares of 2 and 1 are 8, 4. Each is one at least where there are as many, and no more than `most` says, where
    that leaves room for all; equal shares give what `balanced` does.
    """
    if not most and min(shares) == max(shares):
        return balanced(size, len(shares))
    least = int(size >= len(shares))
    limits = list(most) if most and sum(most) >= size and min(most) >= least else [size] * len(shares)

    def at(level: float) -> list[int]:
        """As many as come before `level`, where the n-th of a device comes at n / share."""
        return [min(max(int(level * s), least), n) for s, n in zip(shares, limits, strict=True)]

    low, high = 0.0, (size + 1) / min(shares)
    for _ in range(96):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= size else (low, middle)
    found = at(low)
    for _ in range(size - sum(found)):
        free = [i for i, n in enumerate(found) if n < limits[i]]
        next_ = min(free, key=lambda i: ((found[i] + 1) / shares[i], i))
        found[next_] += 1
    return tuple(found)


def dividing(placement: Shard) -> Divide:
    """How a split without sizes divides a dim: evenly, in blocks, or in proportion to its shares."""
    if placement.shares:
        return lambda size, ranks: proportional(size, placement.shares)
    return chunked if placement.chunk else balanced


def scaled(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """`size` in the proportions of `sizes`: 10 as 3, 2 is 6, 4."""
    total = sum(sizes)
    ends = [(2 * sum(sizes[:i]) * size + total) // (2 * total) for i in range(len(sizes) + 1)]
    return tuple(b - a for a, b in pairwise(ends))


def units_of(cut: Cut, outer: int, size: int, inner: int, where: str) -> Cut:
    """The cut of the `size` units of a class when the user cuts a dim of `outer` x `size` x `inner` elements as `cut`.

    The cut may be written for the dim as it is, stretch by stretch (``3*(384|384)``), or as if the `outer` stretches
    were one (``1152|1152``). Raises `PlacementError` when the sizes do not add up to the dim, or tear apart what
    belongs together.
    """
    total = outer * size * inner
    if cut.total != total:
        raise PlacementError(f"the sizes {cut} add up to {cut.total}, the dim has {total}", where)
    stretches = _stretches(cut, size * inner)
    alike = stretches and all(s == stretches[0] for s in stretches)
    segments, unit = (stretches[0], inner) if alike else (list(cut.segments), outer * inner)
    if any(n % unit for s in segments for n in s.sizes):
        raise PlacementError(
            f"the sizes {cut} tear apart units of {unit} elements that belong together",
            where,
            f"give each device a multiple of {unit}",
        )
    return merged(Segment(s.repeat, tuple(n // unit for n in s.sizes)) for s in segments)


def cut_of(units: Cut, outer: int, inner: int) -> Cut:
    """The cut of a dim of `outer` stretches whose units, of `inner` elements each, are cut as `units`."""
    if outer == inner == 1:
        return units
    segments = [Segment(s.repeat, tuple(n * inner for n in s.sizes)) for s in units.segments]
    if len(segments) == 1:
        return Cut((Segment(outer * segments[0].repeat, segments[0].sizes),))
    return merged(segments * outer)


def refined(size: int, others: Sequence[Cut], ranks: int, divide: Divide = balanced) -> Cut:
    """A cut of a dim of `size` elements that divides each shard of `others` by itself."""
    bounds = {0, size}.union(*map(_bounds, others))
    return merged(Segment(1, divide(b - a, ranks)) for a, b in pairwise(sorted(bounds)))


@lru_cache(maxsize=4096)
def nested(first: Cut, second: Cut) -> bool:
    """Whether one of two cuts of a dim divides each shard of the other by itself: ``4|3`` and ``2|2 + 2|1``."""
    return _divides(first, second) or _divides(second, first)


def reject_crossing(placements: Sequence[Placement], where: str) -> None:
    """Raise `PlacementError` when the sizes given for one dim along two mesh axes do not fit each other."""
    sized = [p for p in placements if isinstance(p, Shard) and p.cut]
    for number, second in enumerate(sized):
        for first in sized[:number]:
            assert first.cut is not None
            assert second.cut is not None
            if first.dim == second.dim and not nested(first.cut, second.cut):
                fitting = refined(first.cut.total, [first.cut], second.cut.ranks)
                raise PlacementError(
                    f"the sizes of {second} do not divide each part of {first} by itself",
                    where,
                    f"list the sizes within each part: S[{second.dim}: {fitting}], or give no sizes: S[{second.dim}]",
                )


def merged(segments: Iterable[Segment]) -> Cut:
    """The cut of these segments in order, equal neighbours written as one."""
    found: list[Segment] = []
    for segment in segments:
        if found and found[-1].sizes == segment.sizes:
            found[-1] = Segment(found[-1].repeat + segment.repeat, segment.sizes)
        else:
            found.append(segment)
    return Cut(tuple(found))


def _stretches(cut: Cut, length: int) -> list[list[Segment]]:
    """The segments of a cut by stretches of `length` elements; none when a segment reaches from one into another."""
    found: list[list[Segment]] = []
    room = 0
    for segment in cut.segments:
        width = sum(segment.sizes)
        for _ in range(segment.repeat if width else 0):
            if not room:
                found.append([])
                room = length
            if width > room:
                return []
            found[-1].append(Segment(1, segment.sizes))
            room -= width
    return found


def _bounds(cut: Cut) -> set[int]:
    """Where the shards of a cut begin and end."""
    return set(accumulate(n for s in cut.segments for _ in range(s.repeat) for n in s.sizes))


def _divides(first: Cut, second: Cut) -> bool:
    """Whether no segment of `first` reaches from one shard of `second` into another."""
    ends = {0, *accumulate(sum(s.sizes) for s in first.segments for _ in range(s.repeat))}
    return _bounds(second) <= ends
