"""What the device at some coordinates of a mesh holds of a tensor that is laid out over it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from distir_relax.layout.cut import Interval, intersect
from distir_relax.layout.mesh import DeviceMesh
from distir_relax.layout.placement import At, Placement, R, Shard


def held_intervals(placements: Sequence[Placement], dim: int, size: int, coordinates: Sequence[int]) -> list[Interval]:
    """The intervals of a dim of `size` elements that the device at `coordinates` holds, in order.

    Each mesh axis that cuts the dim says by itself what its indices hold of it; a device holds what all of them leave
    it. The cuts of the axes must be decided.
    """
    held = [(0, size)] if size else []
    for placement, index in zip(placements, coordinates, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            assert placement.cut is not None
            held = intersect(held, placement.cut.intervals(index))
    return held


def holds(placements: Sequence[Placement], coordinates: Sequence[int]) -> bool:
    """Whether the device at `coordinates` holds anything of a tensor: `At` leaves out the others along its axis."""
    return all(not isinstance(p, At) or p.index == i for p, i in zip(placements, coordinates, strict=True))


def holders(placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[int, ...]:
    """The devices that hold anything of a tensor, in ascending order."""
    return _holders(tuple(p if isinstance(p, At) else R for p in placements), mesh)


@lru_cache(maxsize=1024)
def _holders(placements: tuple[Placement, ...], mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(device for device in range(mesh.size) if holds(placements, mesh.coordinates(device)))


def block_bounds(placements: Sequence[Placement], dim: int, size: int, mesh: Sequence[int]) -> tuple[int, ...] | None:
    """Where the blocks of a dim of `size` elements begin, one for each device along the axes that cut it, and its end.

    The devices are taken row by row. None unless each holds one block (or nothing) and the blocks follow each other in
    that order. `placements` may be those of the first axes of `mesh` only.
    """
    cuts = [(axis, p.cut) for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    bounds = [0]
    for indices in itertools.product(*(range(mesh[axis]) for axis, _ in cuts)):
        held = [(0, size)]
        for (_, cut), index in zip(cuts, indices, strict=True):
            assert cut is not None
            held = intersect(held, cut.intervals(index))
        if len(held) > 1 or any(start != bounds[-1] for start, _ in held):
            return None
        bounds.append(held[0][1] if held else bounds[-1])
    return tuple(bounds)
