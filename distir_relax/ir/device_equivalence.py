"""Which devices are alike: what differs by device is worked out once for each kind of device, and spread out late.

A mesh of a thousand devices has few kinds of them: those with the same sizes, or with the same coordinates along the
axes that matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from distir_relax.ir.types import DTensorType, PerRank, PlacedType, Size, at_rank, per_rank
from distir_relax.layout import DeviceMesh, Placement, Shard, held_intervals, holders
from distir_relax.layout.partition import dividing, refined
from distir_relax.layout.validate import fit_placements


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of the devices of a set: `of[i]` is the kind of the i-th device, `firsts[k]` the first of kind k."""

    firsts: tuple[int, ...]
    of: tuple[int, ...]

    def spread(self, values: Sequence[int]) -> Size:
        """A number for each kind, as a number for each device; as one number where they agree."""
        if len(set(values)) == 1:
            return values[0]
        return _spread(tuple(values), self.of)


@lru_cache(maxsize=512)
def kinds_of(columns: tuple[tuple[int, ...], ...], count: int) -> Kinds:
    """The kinds of `count` devices, told apart by columns that have a number for each of them."""
    if not columns:
        return Kinds((0,) if count else (), (0,) * count)
    rows = list(zip(*columns, strict=True))
    numbers = {row: kind for kind, row in enumerate(dict.fromkeys(rows))}
    firsts = dict(zip(reversed(rows), range(count - 1, -1, -1), strict=True))
    return Kinds(tuple(firsts[row] for row in numbers), tuple([numbers[row] for row in rows]))


@lru_cache(maxsize=1024)
def mesh_kinds(mesh: DeviceMesh, axes: tuple[int, ...]) -> Kinds:
    """The kinds of a mesh's devices, told apart by their coordinates along some axes."""
    columns = list(zip(*product(*map(range, mesh.shape)), strict=True))
    return kinds_of(tuple(columns[axis] for axis in axes), mesh.size)


@lru_cache(maxsize=1024)
def held_size(placements: tuple[Placement, ...], dim: int, size: int, mesh: DeviceMesh) -> Size:
    """How many elements of a dim of `size` each device of the mesh holds."""
    kinds = mesh_kinds(mesh, tuple(i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim))
    pieces = (held_intervals(placements, dim, size, mesh.coordinates(first)) for first in kinds.firsts)
    return kinds.spread([sum(stop - start for start, stop in held) for held in pieces])


def local_type(layout: DTensorType, mesh: DeviceMesh) -> PlacedType:
    """What each device of the mesh that has some of a laid-out tensor holds of it."""
    devices = holders(layout.placements, mesh)
    shape: list[Size] = []
    for dim, size in enumerate(layout.shape):
        held = held_size(layout.placements, dim, size, mesh)
        shape.append(per_rank([at_rank(held, device) for device in devices]) if isinstance(held, PerRank) else held)
    return PlacedType(tuple(shape), layout.dtype, devices)


def lay_out(shape: tuple[int, ...], dtype: str, placements: str, mesh: DeviceMesh) -> tuple[DTensorType, PlacedType]:
    """A global tensor laid out over `mesh`, cuts that are not given balanced, and what each of its devices holds.

    Raises `PlacementError` where the placements do not fit.
    """
    fitted: list[Placement] = []
    for p, ranks in zip(fit_placements(placements, mesh, shape), mesh.shape, strict=True):
        if isinstance(p, Shard) and p.cut is None:
            before = [other.cut for other in fitted if isinstance(other, Shard) and other.dim == p.dim and other.cut]
            p = Shard(p.dim, refined(shape[p.dim], before, ranks, dividing(p)))
        fitted.append(p)
    layout = DTensorType(shape, dtype, tuple(fitted))
    return layout, local_type(layout, mesh)


@lru_cache(maxsize=1024)
def _spread(values: tuple[int, ...], of: tuple[int, ...]) -> PerRank:
    return PerRank(tuple([values[kind] for kind in of]))
