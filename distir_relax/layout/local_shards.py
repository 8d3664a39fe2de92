"""Local shards: the part of a tensor on the device at given mesh coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

from distir_relax.layout.cut import Cut, Interval, Segment, intersect
from distir_relax.layout.mesh import DeviceMesh
from distir_relax.layout.placement import At, Placement, R, Shard
from distir_relax.layout.symbolic_size import UndecidedSize, total


def local_intervals(placements: Sequence[Placement], dim: int, size: int, coordinates: Sequence[int]) -> list[Interval]:
    """Return the intervals of a dim of `size` elements on the device at `coordinates`, in order.

    This is the intersection of its intervals along each mesh axis that cuts the dim. All cuts must be resolved.
    """
    intervals = [(0, size)] if size != 0 else []
    for placement, index in zip(placements, coordinates, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            assert placement.cut is not None
            part = placement.cut.intervals(index)
            intervals = part if intervals == [(0, size)] else intersect(intervals, part)
    return intervals


def local_length(placements: Sequence[Placement], dim: int, size: int, coordinates: Sequence[int]) -> int:
    """Return the number of elements of a dim of `size` elements on the device at `coordinates`.

    Unlike `local_intervals` it takes cuts into a symbolic number of parts.
    """
    if (parts := interleaved_parts(placements, dim)) is None:
        return total(stop - start for start, stop in local_intervals(placements, dim, size, coordinates))
    matrix = [in_matrix(p, dim, parts) for p in placements]
    rows = local_length(matrix, dim, parts.repeat, coordinates)
    return rows * local_length(matrix, dim + 1, total(parts.sizes), coordinates)


def interleaved_parts(placements: Iterable[Placement], dim: int) -> Segment | None:
    """Return the parts that some of `placements` interleaves in a dim, of a symbolic number; None without them."""
    cuts = (p.cut for p in placements if isinstance(p, Shard) and p.dim == dim)
    return next((cut.interleaved for cut in cuts if cut and cut.interleaved), None)


def in_matrix(placement: Placement, dim: int, parts: Segment) -> Placement:
    """Return a placement of a tensor where `dim` is two dims: the number of `parts`, and the elements of each.

    Raises `UndecidedSize` for a cut that divides neither of them alone.
    """
    if not isinstance(placement, Shard) or placement.dim < dim:
        return placement
    assert placement.cut is not None
    if placement.dim > dim:
        return Shard(placement.dim + 1, placement.cut)
    if (found := placement.cut.along_parts(parts)) is None:
        raise UndecidedSize(f"the sizes {placement.cut} cross the parts of {Cut((parts,))}")
    number, cut = found
    return Shard(dim + number, cut)


def has_shard(placements: Sequence[Placement], coordinates: Sequence[int]) -> bool:
    """Whether the device at `coordinates` has a shard: under `At` only one index along the axis has."""
    return all(not isinstance(p, At) or p.index == i for p, i in zip(placements, coordinates, strict=True))


def shard_devices(placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the devices that have a shard, in ascending order."""
    return _shard_devices(tuple(p if isinstance(p, At) else R for p in placements), mesh)


@lru_cache(maxsize=1024)
def _shard_devices(placements: tuple[Placement, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(device for device in range(mesh.size) if has_shard(placements, mesh.coordinates(device)))


def block_bounds(placements: Sequence[Placement], dim: int, size: int, mesh: Sequence[int]) -> tuple[int, ...] | None:
    """Return the block boundaries of a dim of `size` elements, one block per device along the axes that cut it.

    The devices are in row-major order. Returns None unless each has at most one block and the blocks are consecutive in
    that order. `placements` may be those of the first axes of `mesh` only.
    """
    cuts = [(axis, p.cut) for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    if interleaved_parts(placements, dim):
        return None
    bounds = [0]
    for indices in itertools.product(*(range(mesh[axis]) for axis, _ in cuts)):
        intervals = [(0, size)]
        for (_, cut), index in zip(cuts, indices, strict=True):
            assert cut is not None
            part = cut.intervals(index)
            intervals = part if intervals == [(0, size)] else intersect(intervals, part)
        if len(intervals) > 1 or any(start != bounds[-1] for start, _ in intervals):
            return None
        bounds.append(intervals[0][1] if intervals else bounds[-1])
    return tuple(bounds)
