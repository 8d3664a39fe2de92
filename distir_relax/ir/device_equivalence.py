"""Equivalence classes of devices: compute per-device quantities once per class, and expand them to devices last.

A mesh of a thousand devices has few classes: devices with the same sizes, or with the same coordinates along the
relevant axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from distir_relax.ir.types import DTensorType, PerRank, PlacedType, Size, at_rank, per_rank
from distir_relax.layout import DeviceMesh, Placement, Shard, local_length, shard_devices
from distir_relax.layout.partition import partition_rule, refine_cut
from distir_relax.layout.validate import validate_placements


@dataclass(frozen=True, slots=True)
class DeviceEquivalence:
    """Equivalence classes of a device set: `of[i]` is the class of device i, `firsts[k]` class k's first."""

    firsts: tuple[int, ...]
    of: tuple[int, ...]

    def expand(self, values: Sequence[int]) -> Size:
        """Expand one number per class to one per device; a single number if all are equal."""
        if len(set(values)) == 1:
            return values[0]
        return _expand(tuple(values), self.of)


@lru_cache(maxsize=512)
def classify_devices(columns: tuple[tuple[int, ...], ...], count: int) -> DeviceEquivalence:
    """Classify `count` devices by `columns`, each of which has one number per device."""
    if not columns:
        return DeviceEquivalence((0,) if count else (), (0,) * count)
    rows = list(zip(*columns, strict=True))
    numbers = {row: index for index, row in enumerate(dict.fromkeys(rows))}
    firsts = dict(zip(reversed(rows), range(count - 1, -1, -1), strict=True))
    return DeviceEquivalence(tuple(firsts[row] for row in numbers), tuple([numbers[row] for row in rows]))


@lru_cache(maxsize=1024)
def mesh_classes(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceEquivalence:
    """Classify the devices of a mesh by their coordinates along `axes`."""
    columns = list(zip(*product(*map(range, mesh.shape)), strict=True))
    return classify_devices(tuple(columns[axis] for axis in axes), mesh.size)


@lru_cache(maxsize=1024)
def local_size(placements: tuple[Placement, ...], dim: int, size: int, mesh: DeviceMesh) -> Size:
    """Return the number of elements of a dim of `size` on each device of the mesh."""
    classes = mesh_classes(mesh, tuple(i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim))
    return classes.expand([local_length(placements, dim, size, mesh.coordinates(first)) for first in classes.firsts])


def local_type(layout: DTensorType, mesh: DeviceMesh) -> PlacedType:
    """Return the local type of a tensor on the devices that have a shard of it."""
    devices = shard_devices(layout.placements, mesh)
    shape: list[Size] = []
    for dim, size in enumerate(layout.shape):
        local = local_size(layout.placements, dim, size, mesh)
        shape.append(per_rank([at_rank(local, device) for device in devices]) if isinstance(local, PerRank) else local)
    return PlacedType(tuple(shape), layout.dtype, devices)


def make_layout(
    shape: tuple[int, ...], dtype: str, placements: str, mesh: DeviceMesh
) -> tuple[DTensorType, PlacedType]:
    """Return the layout of a tensor on `mesh` (unspecified cuts are balanced) and its local type.

    Raises `PlacementError` if the placements do not fit.
    """
    result: list[Placement] = []
    for p, ranks in zip(validate_placements(placements, mesh, shape), mesh.shape, strict=True):
        if isinstance(p, Shard) and p.cut is None:
            before = [other.cut for other in result if isinstance(other, Shard) and other.dim == p.dim and other.cut]
            p = Shard(p.dim, refine_cut(shape[p.dim], before, ranks, partition_rule(p)))
        result.append(p)
    layout = DTensorType(shape, dtype, tuple(result))
    return layout, local_type(layout, mesh)


@lru_cache(maxsize=1024)
def _expand(values: tuple[int, ...], of: tuple[int, ...]) -> PerRank:
    return PerRank(tuple([values[class_index] for class_index in of]))
