"""Local shards: the part of a tensor on the device at given mesh coordinates."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from distir_relax.layout.cut import Interval, intersect
from distir_relax.layout.mesh import DeviceMesh
from distir_relax.layout.placement import At, Placement, R, Shard


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
