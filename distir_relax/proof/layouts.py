"""The layouts of tensors on devices, by the types of the sharded program and those of the schedule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distir_relax.ir import DTensorType, PlacedType, Size, at_rank
from distir_relax.layout import DeviceMesh, Shard, local_intervals
from distir_relax.layout import Partial as PartialPlacement
from distir_relax.proof.pieces import Equalities, Groups, Layout, Mismatch, Piece, Tables
from distir_relax.proof.terms import Terms


class Layouts:
    """The layouts that types give to `terms` on the devices of a mesh.

    `axes` are the numbers of the axes of the sharded program's mesh in that of the schedule.
    """

    def __init__(self, mesh: DeviceMesh, axes: list[int], terms: Terms) -> None:
        self.mesh = mesh
        self.axes = axes
        self.terms = terms
        self.tables: Tables = terms.tables
        self.groups: dict[tuple[int, ...], Groups] = {}
        self._groups: dict[int, Groups] = {}
        """The groups of device sets, by identity."""
        self._memo: dict[object, list[Layout] | Mismatch] = {}
        self._fitting: dict[object, bool] = {}
        self._having: dict[object, bool] = {}

    def groups_of(self, devices: tuple[int, ...]) -> Groups:
        """Return the groups of a device set."""
        # Most equal device sets are one object, and the hash of a large one takes long.
        found = self._groups.get(id(devices))
        if found is None:
            found = self.groups.setdefault(devices, Groups(self.mesh, devices))
            if found.devices is devices:
                self._groups[id(devices)] = found
        return found

    def layout(self, kind: DTensorType, devices: tuple[int, ...], number: int) -> Layout:
        """Return the layout that a type of the sharded program gives to a tensor on some devices."""
        equalities = self.terms.equalities[number]
        key = ("layout", kind, id(self.groups_of(devices)), equalities)
        return self.cached(key, lambda: [self._layout(kind, devices, equalities)])[0]

    def cached(self, key: object, compute: Callable[[], list[Layout]]) -> list[Layout]:
        """Return the layouts that `compute` gives, once for each key; it may raise `Mismatch` instead."""
        found = self._memo.get(key)
        if found is None:
            try:
                found = compute()
            except Mismatch as reason:
                found = reason
            self._memo[key] = found
        if isinstance(found, Mismatch):
            raise found
        return found

    def fits(self, layout: Layout, kind: PlacedType, dims: int | None = None) -> bool:
        """Whether devices hold as many elements by a layout as by a type, along all dims or at least `dims` of them."""
        if len(layout.dims) != len(kind.shape):
            return False
        least = len(layout.dims) if dims is None else dims
        return sum(self._fits(table, size) for table, size in zip(layout.dims, kind.shape, strict=True)) >= least

    def has_parts(self, piece: Piece, dim: int, other: int) -> bool:
        """Whether devices have the elements of another table of a dim, and padding, or nothing of the piece at all."""
        key = piece.dims, dim, other
        if key not in self._having:
            self._having[key] = self._have_parts(piece, dim, other)
        return self._having[key]

    def _layout(self, kind: DTensorType, devices: tuple[int, ...], equalities: Equalities) -> Layout:
        places = [[place[axis] for axis in self.axes] for place in self.groups_of(devices).coordinates]
        dims = []
        for dim, size in enumerate(kind.shape):
            axes = [i for i, p in enumerate(kind.placements) if isinstance(p, Shard) and p.dim == dim]
            rows: dict[tuple[int, ...], int] = {}
            for place in places:
                key = tuple(place[axis] for axis in axes)
                if key not in rows:
                    parts = local_intervals(kind.placements, dim, size, place)
                    row = self.tables.row(np.concatenate([np.zeros(0), *(np.arange(a, b) for a, b in parts)]))
                    rows[key] = self.tables.first(row, equalities[dim])
            dims.append(self.tables.table(rows[tuple(place[axis] for axis in axes)] for place in places))
        pending = [""] * len(self.mesh.shape)
        for axis, placement in zip(self.axes, kind.placements, strict=True):
            if isinstance(placement, PartialPlacement) and self.mesh.shape[axis] > 1:
                pending[axis] = placement.reduction
        return Layout(tuple(dims), tuple(pending), (None,) * len(dims))

    def _fits(self, table: int, size: Size) -> bool:
        key = table, size
        if key not in self._fitting:
            lengths = [len(self.tables.rows[row]) for row in self.tables.tables[table]]
            self._fitting[key] = all(n == at_rank(size, position) for position, n in enumerate(lengths))
        return self._fitting[key]

    def _have_parts(self, piece: Piece, dim: int, other: int) -> bool:
        devices = zip(*(self.tables.tables[table] for table in piece.dims), self.tables.tables[other], strict=True)
        for *rows, row in set(devices):
            vector = self.tables.rows[rows[dim]]
            if all(map(self.tables.has_elements, rows)) and not np.array_equal(
                vector[vector >= 0], self.tables.rows[row]
            ):
                return False
        return True
