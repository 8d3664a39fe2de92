"""What devices lack of a value in one layout that they hold in another: so much has to be sent, at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.cost.network import least_seconds_per_byte
from distir_relax.cost.profile import Profile
from distir_relax.ir import TensorType, mesh_kinds
from distir_relax.layout import DeviceMesh, Interval, Partial, Placement, Replicate, Shard, held_intervals
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Lacking:
    """Finds how long redistributions on a mesh of a machine take at least, many at once."""

    mesh: DeviceMesh
    profile: Profile
    _known: dict[object, Array] = field(default_factory=dict)
    _shared: dict[object, tuple[Array, Array]] = field(default_factory=dict)

    def seconds(self, kind: TensorType, sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
        """The least time from each source (row) to each target (column).

        What the devices lack on average goes over the fastest link. Where a sum is made they lack all that they are to
        hold. Raises nothing: of layouts that it knows nothing about it says 0.
        """
        key = (kind, tuple(sources), tuple(targets))
        if key not in self._known:
            each = TensorType((1,), kind.dtype).bytes * least_seconds_per_byte(self.profile)
            self._known[key] = self._elements(kind, sources, targets) * each * self._counted
        return self._known[key]

    @property
    def _counted(self) -> float:
        """The network has each device of n send its peers equal parts, 1 / n of what it holds; it may send them all."""
        return 1.0 - 1.0 / min((n for n in self.mesh.shape if n > 1), default=2)

    def _elements(self, kind: TensorType, sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
        layouts = list(dict.fromkeys((*sources, *targets)))
        number = {lies: i for i, lies in enumerate(layouts)}
        rows, columns = (np.array([number[lies] for lies in some]) for some in (sources, targets))
        held = np.ones((len(layouts), self.mesh.size))
        common = np.ones((len(rows), len(columns), self.mesh.size))
        for dim, size in enumerate(kind.shape):
            numbers: dict[Placed, int] = {}
            which = np.array([numbers.setdefault(_of_dim(lies, dim), len(numbers)) for lies in layouts])
            has, both = self._pieces(dim, size, tuple(numbers))
            held *= has[which]
            common *= both[which[rows]][:, which[columns]]
        sums = _makes_sums(sources, targets)
        lacks = held[columns][None] - np.where(sums[:, :, None], 0.0, common)
        known = np.array([_is_known(lies) for lies in layouts])
        return np.where(np.logical_and.outer(known[rows], known[columns]), lacks.mean(axis=2), 0.0)

    def _pieces(self, dim: int, size: int, cuts: tuple[Placed, ...]) -> tuple[Array, Array]:
        """How much of a dim each device has by each cut, and how much by both of two."""
        key = (dim, size, cuts)
        if key not in self._shared:
            has, lengths = _stretches(dim, size, cuts, self.mesh)
            # The products are of whole numbers, so exact in any order.
            by_device = has.transpose(1, 0, 2) * lengths
            both = by_device @ has.transpose(1, 2, 0)
            self._shared[key] = by_device.sum(axis=2).T, both.transpose(1, 2, 0)
        return self._shared[key]


def _stretches(dim: int, size: int, cuts: Sequence[Placed], mesh: DeviceMesh) -> tuple[Array, Array]:
    """The stretches of a dim that no cut divides: which of them each device has by each cut, and their lengths."""
    held = [_held(cut, dim, size, mesh) for cut in cuts]
    ends = sorted({0, size, *(end for row in held for some in row for stretch in some for end in stretch)})
    place = {end: i for i, end in enumerate(ends)}
    has = np.zeros((len(cuts), mesh.size, len(ends) - 1))
    for row, cut, some in zip(has, cuts, held, strict=True):
        each = np.zeros((len(some), len(ends) - 1))
        for mine, stretches in zip(each, some, strict=True):
            for start, stop in stretches:
                mine[place[start] : place[stop]] = 1.0
        row[:] = each[list(mesh_kinds(mesh, _cutting(cut)).of)]
    return has, np.diff(np.array(ends, dtype=float))


def _held(cut: Placed, dim: int, size: int, mesh: DeviceMesh) -> list[list[Interval]]:
    """What each kind of device has of a dim: they differ along the axes that cut it."""
    firsts = mesh_kinds(mesh, _cutting(cut)).firsts
    return [held_intervals(cut, dim, size, mesh.coordinates(device)) for device in firsts]


def _cutting(cut: Placed) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(cut) if isinstance(placement, Shard))


def _of_dim(lies: Placed, dim: int) -> Placed:
    """What of a layout cuts a dim."""
    return tuple([p if isinstance(p, Shard) and p.dim == dim else _WHOLE for p in lies])


_WHOLE: Placement = Replicate()


def _makes_sums(sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
    """Whether a sum that is pending in a source (row) is not in a target (column), as it was, along some axis."""
    number: dict[Placement, int] = {}
    before, after = (
        np.array([[number.setdefault(p, len(number)) for p in lies] for lies in some]) for some in (sources, targets)
    )
    pends = np.array([[isinstance(p, Partial) for p in lies] for lies in sources])
    found: Array = np.any(pends[:, None] & (before[:, None] != after[None]), axis=2)
    return found


def _is_known(lies: Placed) -> bool:
    return all(isinstance(p, Replicate | Partial) or (isinstance(p, Shard) and p.cut is not None) for p in lies)
