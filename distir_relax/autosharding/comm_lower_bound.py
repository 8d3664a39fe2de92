"""Lower bound of redistribution time: the elements that devices lack in the source layout, over the fastest link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.cost.network import min_seconds_per_byte
from distir_relax.cost.profile import Profile
from distir_relax.ir import TensorType, mesh_classes
from distir_relax.ir.symbols import typical_layout
from distir_relax.layout import DeviceMesh, Interval, Partial, Placement, Replicate, Shard, local_intervals
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]


@dataclass(slots=True)
class CommLowerBound:
    """Compute lower bounds of redistributions on a mesh of a machine, many at once."""

    mesh: DeviceMesh
    profile: Profile
    _cache: dict[object, Array] = field(default_factory=dict)
    _overlap_cache: dict[object, tuple[Array, Array]] = field(default_factory=dict)

    def seconds(self, tensor: TensorType, sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
        """Return the lower bound from each source (row) to each target (column), in seconds.

        The average number of elements that a device lacks goes over the fastest link. After a reduction it lacks its
        whole shard. Layouts without explicit cuts count 0.
        """
        key = (tensor, tuple(sources), tuple(targets))
        if key not in self._cache:
            element_seconds = TensorType((1,), tensor.dtype).bytes * min_seconds_per_byte(self.profile)
            sides = [list(map(typical_layout, layouts)) for layouts in (sources, targets)]
            self._cache[key] = self._missing_elements(tensor.typical, *sides) * element_seconds * self._sent_fraction
        return self._cache[key]

    @property
    def _sent_fraction(self) -> float:
        """Return 1 - 1/n: a device of n sends only the parts for its peers, the bound counts whole shards."""
        return 1.0 - 1.0 / min((n for n in self.mesh.shape if n > 1), default=2)

    def _missing_elements(self, tensor: TensorType, sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
        layouts = list(dict.fromkeys((*sources, *targets)))
        number = {layout: i for i, layout in enumerate(layouts)}
        rows, columns = (np.array([number[layout] for layout in group]) for group in (sources, targets))
        local = np.ones((len(layouts), self.mesh.size))
        overlap = np.ones((len(rows), len(columns), self.mesh.size))
        for dim, size in enumerate(tensor.shape):
            ids: dict[Placed, int] = {}
            which = np.array([ids.setdefault(_project_dim(layout, dim), len(ids)) for layout in layouts])
            sizes, overlaps = self._overlaps(dim, size, tuple(ids))
            local *= sizes[which]
            overlap *= overlaps[which[rows]][:, which[columns]]
        is_reduced = _reduces(sources, targets)
        missing = local[columns][None] - np.where(is_reduced[:, :, None], 0.0, overlap)
        is_supported = np.array([_is_supported(layout) for layout in layouts])
        return np.where(np.logical_and.outer(is_supported[rows], is_supported[columns]), missing.mean(axis=2), 0.0)

    def _overlaps(self, dim: int, size: int, cuts: tuple[Placed, ...]) -> tuple[Array, Array]:
        """Return the size of each device's part of a dim by each cut, and of the overlap of each two cuts."""
        key = (dim, size, cuts)
        if key not in self._overlap_cache:
            is_local, lengths = _atomic_pieces(dim, size, cuts, self.mesh)
            # The products are integers, so they are exact in any order.
            by_device = is_local.transpose(1, 0, 2) * lengths
            overlap = by_device @ is_local.transpose(1, 2, 0)
            self._overlap_cache[key] = by_device.sum(axis=2).T, overlap.transpose(1, 2, 0)
        return self._overlap_cache[key]


def _atomic_pieces(dim: int, size: int, cuts: Sequence[Placed], mesh: DeviceMesh) -> tuple[Array, Array]:
    """Return the pieces of a dim that no cut divides: which of them each device has by each cut, and their lengths."""
    intervals = [_class_intervals(cut, dim, size, mesh) for cut in cuts]
    ends = sorted({0, size, *(end for parts in intervals for pieces in parts for piece in pieces for end in piece)})
    index = {end: i for i, end in enumerate(ends)}
    is_local = np.zeros((len(cuts), mesh.size, len(ends) - 1))
    for device_rows, cut, parts in zip(is_local, cuts, intervals, strict=True):
        class_rows = np.zeros((len(parts), len(ends) - 1))
        for class_row, pieces in zip(class_rows, parts, strict=True):
            for start, stop in pieces:
                class_row[index[start] : index[stop]] = 1.0
        device_rows[:] = class_rows[list(mesh_classes(mesh, _split_axes(cut)).of)]
    return is_local, np.diff(np.array(ends, dtype=float))


def _class_intervals(cut: Placed, dim: int, size: int, mesh: DeviceMesh) -> list[list[Interval]]:
    """Return the intervals of a dim of each device class; classes differ along the axes that cut it."""
    firsts = mesh_classes(mesh, _split_axes(cut)).firsts
    return [local_intervals(cut, dim, size, mesh.coordinates(device)) for device in firsts]


def _split_axes(cut: Placed) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(cut) if isinstance(placement, Shard))


def _project_dim(layout: Placed, dim: int) -> Placed:
    """Return the placements of a layout that cut a dim; all others replicated."""
    return tuple([p if isinstance(p, Shard) and p.dim == dim else _REPLICATED for p in layout])


_REPLICATED: Placement = Replicate()


def _reduces(sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
    """Return whether a partial sum of a source (row) is reduced in a target (column), along some axis."""
    ids: dict[Placement, int] = {}
    before, after = (
        np.array([[ids.setdefault(p, len(ids)) for p in layout] for layout in group]) for group in (sources, targets)
    )
    is_partial = np.array([[isinstance(p, Partial) for p in layout] for layout in sources])
    is_reduced: Array = np.any(is_partial[:, None] & (before[:, None] != after[None]), axis=2)
    return is_reduced


def _is_supported(layout: Placed) -> bool:
    return all(isinstance(p, Replicate | Partial) or (isinstance(p, Shard) and p.cut is not None) for p in layout)
