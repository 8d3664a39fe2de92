"""Pieces: the parts of one tensor of the sharded program that devices hold.

A *row* is the vector of the elements of one dim on one device: their numbers along the dim, `PADDING` for padding. A
*table* has a row for each device. Rows and tables are kept once, and known by number: equal ones have one number, so
that pieces are compared by numbers, and what follows from them is computed once for all layers of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distir_relax.layout import DeviceMesh
from distir_relax.ops.table.positions import PADDING, Vector

SAME = 1 << 50
"""The number of elements of a dim along which all elements are equal, whatever their numbers."""


class Mismatch(Exception):
    """Pieces do not fit an op, for the reason that it gives."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The parts of a tensor on devices. `term` is its number in the sharded program; None for parts of several.

    `dims` has a table for each dim. Without a term, rows have the numbers of elements in all of the program's tensors
    (`Terms.base`). `pending` has the reduction of the terms along each mesh axis, an empty text for none. `fills` has
    for each dim the number that its padding contains, None if it is not known.
    """

    term: int | None
    dims: tuple[int, ...]
    pending: tuple[str, ...]
    fills: tuple[float | None, ...]

    @property
    def layout(self) -> Layout:
        """The piece without its term."""
        return Layout(self.dims, self.pending, self.fills)


@dataclass(frozen=True, slots=True)
class Layout:
    """How devices hold some tensor: a piece without its term."""

    dims: tuple[int, ...]
    pending: tuple[str, ...]
    fills: tuple[float | None, ...]

    def of(self, term: int | None) -> Piece:
        """Return the piece of a tensor with this layout."""
        return Piece(term, self.dims, self.pending, self.fills)


@dataclass(slots=True)
class Tables:
    """Rows and tables by number."""

    rows: list[Vector] = field(default_factory=list)
    tables: list[tuple[int, ...]] = field(default_factory=list)
    _row_ids: dict[bytes, int] = field(default_factory=dict)
    _table_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    _ranges: dict[tuple[int, int], int] = field(default_factory=dict)

    def row(self, vector: Vector) -> int:
        """Return the number of a row."""
        vector = np.ascontiguousarray(vector, np.int64)
        key = vector.tobytes()
        if key not in self._row_ids:
            self._row_ids[key] = len(self.rows)
            self.rows.append(vector)
        return self._row_ids[key]

    def range(self, size: int, start: int = 0) -> int:
        """Return the row of consecutive elements."""
        key = start, size
        if key not in self._ranges:
            self._ranges[key] = self.row(np.arange(start, start + size))
        return self._ranges[key]

    def same(self, length: int, size: int) -> int:
        """Return the row of `length` equal elements of a dim of `size`; of all of them, those of the dim."""
        return self.range(size) if length == size else self.row(np.full(length, SAME))

    def is_same(self, row: int) -> bool:
        """Whether a row has elements of a dim along which all are equal."""
        vector = self.rows[row]
        return len(vector) > 0 and bool(vector[0] == SAME)

    def may_be(self, row: int, other: int) -> bool:
        """Whether the elements of a row are those of another, or equal to them."""
        return row == other or (self.is_same(row) and len(self.rows[row]) == len(self.rows[other]))

    def is_padded(self, row: int) -> bool:
        """Whether a row contains padding."""
        vector = self.rows[row]
        return len(vector) > 0 and bool(vector.min() < 0)

    def table(self, rows: Iterable[int]) -> int:
        """Return the number of a table."""
        key = tuple(rows)
        if key not in self._table_ids:
            self._table_ids[key] = len(self.tables)
            self.tables.append(key)
        return self._table_ids[key]

    def full(self, size: int, devices: int) -> int:
        """Return the table of devices that hold all of a dim."""
        return self.table((self.range(size),) * devices)

    def select(self, table: int, positions: Sequence[int]) -> int:
        """Return the table of some of the devices of another, in this order."""
        rows = self.tables[table]
        return self.table(rows[position] for position in positions)


@dataclass(frozen=True)
class Groups:
    """The devices of a value along the axes of a mesh."""

    mesh: DeviceMesh
    devices: tuple[int, ...]

    @cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """The coordinates of each device."""
        return [self.mesh.coordinates(device) for device in self.devices]

    @cached_property
    def key(self) -> object:
        """The same for devices that differ only in coordinates that all of them share, such as those of two stages."""
        columns = list(zip(*self.coordinates, strict=True))
        return tuple(column if len(set(column)) > 1 else len(column) for column in columns)

    def along(self, axes: Sequence[int]) -> list[list[int]]:
        """Return the positions of devices in groups that differ along `axes` only, each in order along them."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for position, place in enumerate(self.coordinates):
            groups.setdefault(tuple(c for i, c in enumerate(place) if i not in axes), []).append(position)
        return list(groups.values())

    def varies(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the axes along which rows, one for each device, differ."""
        axes = []
        for axis in range(len(self.mesh.shape)):
            if any(rows[position] != rows[group[0]] for group in self.along((axis,)) for position in group):
                axes.append(axis)
        return tuple(axes)


def digits(vector: Vector, sizes: Sequence[int]) -> list[Vector] | None:
    """Return the elements of each factor of a dim whose products are a row; None if it is no product.

    `sizes` are those of the factors, outermost first. A row of padding of a factor is padding in the dim.
    """
    strides = [int(np.prod(sizes[i + 1 :], dtype=np.int64)) for i in range(len(sizes))]
    padded = vector < 0
    if not len(vector):
        return None
    for shape in _shapes(vector, sizes, strides):
        table, mask = vector.reshape(shape), padded.reshape(shape)
        rows = []
        for factor, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            digit = np.moveaxis(np.where(mask, PADDING, table // stride % size), factor, 0)
            rows.append(digit.reshape(shape[factor], -1).max(axis=1))
        if np.array_equal(composed(rows, sizes), vector):
            return rows
    return None


def composed(rows: Sequence[Vector], sizes: Sequence[int]) -> Vector:
    """Return the row of a dim from those of its factors, outermost first: the inverse of `digits`."""
    result = np.zeros(1, np.int64)
    for row, size in zip(rows, sizes, strict=True):
        total = result[:, None] * size + row
        negative = (result[:, None] < 0) | (row < 0)
        result = np.where(negative, PADDING, total).reshape(-1)
    return result


def _shapes(vector: Vector, sizes: Sequence[int], strides: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Iterate over the sizes that the factors of a row may have."""
    if (vector >= 0).all():
        counts = tuple(len(np.unique(vector // stride % size)) for size, stride in zip(sizes, strides, strict=True))
        if np.prod(counts, dtype=np.int64) == len(vector):
            yield counts
        return
    for factor in range(len(sizes)):
        others = int(np.prod([size for i, size in enumerate(sizes) if i != factor], dtype=np.int64))
        if len(vector) % others == 0:
            yield (*sizes[:factor], len(vector) // others, *sizes[factor + 1 :])
