"""How many units of a class each device holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from distir_relax.errors import PlacementError
from distir_relax.ir import Cut, Segment


def balanced(size: int, ranks: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger first: 12 heads on 5 devices are 3, 3, 2, 2, 2."""
    each, extra = divmod(size, ranks)
    return tuple(each + (i < extra) for i in range(ranks))


def chunked(size: int, ranks: int) -> tuple[int, ...]:
    """Blocks of ``ceil(size / ranks)`` until none is left, as torch and TVM cut: 12 on 5 are 3, 3, 3, 3, 0."""
    block = -(-size // ranks)
    return tuple(max(0, min(block, size - i * block)) for i in range(ranks))


def scaled(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """`size` in the proportions of `sizes`: 10 as 3, 2 is 6, 4."""
    total = sum(sizes)
    ends = [(2 * sum(sizes[:i]) * size + total) // (2 * total) for i in range(len(sizes) + 1)]
    return tuple(b - a for a, b in pairwise(ends))


def units_of(cut: Cut, outer: int, size: int, inner: int, where: str) -> tuple[int, ...]:
    """The units that each device holds when the user cuts a dim of `outer` x `size` x `inner` elements as `cut`.

    Raises `PlacementError` when the sizes do not add up to the dim, or tear apart what belongs together.
    """
    total = outer * size * inner
    if cut.total != total:
        raise PlacementError(f"the sizes {cut} add up to {cut.total}, the dim has {total}", where)
    held = cut.local_sizes()
    whole = outer * inner
    if any(n % whole for n in held):
        raise PlacementError(
            f"the sizes {cut} tear apart units of {whole} elements that belong together",
            where,
            f"give each device a multiple of {whole}",
        )
    units = tuple(n // whole for n in held)
    if not cut.is_block and cut != cut_of(units, outer, inner):
        raise PlacementError(f"the dim is cut in {outer} stretches of {size * inner}, found {cut}", where)
    return units


def cut_of(units: tuple[int, ...], outer: int, inner: int) -> Cut:
    """The cut of a dim of `outer` stretches, of whose units of `inner` elements each device holds `units`."""
    return Cut((Segment(outer, tuple(n * inner for n in units)),))


def refined(size: int, others: Sequence[Cut], ranks: int) -> Cut:
    """A balanced cut of a dim of `size` elements that also cuts the shards of `others` into even parts."""
    bounds = {0, size}
    for other in others:
        position = 0
        for segment in other.segments:
            for _ in range(segment.repeat):
                for width in segment.sizes:
                    position += width
                    bounds.add(position)
    return merged(Segment(1, balanced(b - a, ranks)) for a, b in pairwise(sorted(bounds)))


def merged(segments: Iterable[Segment]) -> Cut:
    """The cut of these segments in order, equal neighbours written as one."""
    found: list[Segment] = []
    for segment in segments:
        if found and found[-1].sizes == segment.sizes:
            found[-1] = Segment(found[-1].repeat + segment.repeat, segment.sizes)
        else:
            found.append(segment)
    return Cut(tuple(found))
