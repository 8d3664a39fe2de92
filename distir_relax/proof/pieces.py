"""Pieces: the parts of one tensor of the sharded program that devices hold.

A *row* is the vector of the elements of one dim on one device: their numbers along the dim, `PADDING` for padding. A
*table* has a row for each device. Rows and tables are kept once, and known by number: equal ones have one number, so
that pieces are compared by numbers, and what follows from them is computed once for all layers of a model.

Elements of the sharded program that broadcasting makes equal are one element: the row of a dim that an op broadcasts
contains zeros only. The *equality* of a dim is the row of the first element that is equal to each; None if no two are.
A device is *empty* for a tensor of which it has no element: any rows of it are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distir_relax.layout import DeviceMesh
from distir_relax.ops.table.positions import PADDING, Vector

Equalities = tuple[int | None, ...]
"""The equality of each dim of a tensor."""


class Mismatch(Exception):
    """Pieces do not fit an op, for the reason that it gives."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows that devices have by data: along `dim`, those whose group is one of the device's; others are undefined.

    `ids` is the number of the tensor of the group of each row, `groups` the table of the groups.
    """

    dim: int
    ids: int
    groups: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The parts of a tensor on devices. `term` is its number in the sharded program; None for parts of several.

    `dims` has a table for each dim. Without a term, rows have the numbers of elements in all of the program's tensors
    (`Terms.base`). `pending` has the reduction of the terms along each mesh axis, an empty text for none. `fills` has
    for each dim the number that its padding contains, None if it is not known. The positions of devices in `zeros` have
    zeros only, as terms of a pending sum: these are right for any elements, whatever their rows.
    """

    term: int | None
    dims: tuple[int, ...]
    pending: tuple[str, ...]
    fills: tuple[float | None, ...]
    zeros: frozenset[int] = frozenset()
    routed: Routed | None = None

    @property
    def layout(self) -> Layout:
        """The piece without its term."""
        return Layout(self.dims, self.pending, self.fills, self.zeros, self.routed)


@dataclass(frozen=True, slots=True)
class Layout:
    """How devices hold some tensor: a piece without its term."""

    dims: tuple[int, ...]
    pending: tuple[str, ...]
    fills: tuple[float | None, ...]
    zeros: frozenset[int] = frozenset()
    routed: Routed | None = None

    def of(self, term: int | None) -> Piece:
        """Return the piece of a tensor with this layout."""
        return Piece(term, self.dims, self.pending, self.fills, self.zeros, self.routed)


@dataclass(slots=True)
class Tables:
    """Rows and tables by number."""

    rows: list[Vector] = field(default_factory=list)
    tables: list[tuple[int, ...]] = field(default_factory=list)
    _row_ids: dict[bytes, int] = field(default_factory=dict)
    _has: dict[int, bool] = field(default_factory=dict)
    _table_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    _ranges: dict[tuple[int, int], int] = field(default_factory=dict)
    _first: dict[tuple[int, int], int] = field(default_factory=dict)
    _equal: dict[int, int] = field(default_factory=dict)
    _padded: dict[tuple[int, int], int] = field(default_factory=dict)
    _intervals: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def row(self, vector: Vector) -> int:
        """Return the number of a row."""
        vector = np.ascontiguousarray(vector, np.int64)
        size = len(vector)
        if size and vector[0] >= 0 and vector[-1] - vector[0] == size - 1 and (vector[1:] - vector[:-1] == 1).all():
            # Most long rows are consecutive, and their bytes would be as many as those of a batch.
            return self.range(size, int(vector[0]))
        key = vector.tobytes()
        if key not in self._row_ids:
            self._row_ids[key] = len(self.rows)
            self.rows.append(vector)
        return self._row_ids[key]

    def range(self, size: int, start: int = 0) -> int:
        """Return the row of consecutive elements."""
        key = start, size
        if not size:
            return self.row(np.zeros(0, np.int64))
        if key not in self._ranges:
            self._ranges[key] = len(self.rows)
            self.rows.append(np.arange(start, start + size))
        return self._ranges[key]

    def whole(self, size: int, equality: int | None = None) -> int:
        """Return the row of all elements of a dim."""
        return self.range(size) if equality is None else equality

    def equal(self, size: int) -> int:
        """Return the equality of a dim along which all elements are equal."""
        if size not in self._equal:
            self._equal[size] = self.row(np.zeros(size, np.int64))
        return self._equal[size]

    def first(self, row: int, equality: int | None) -> int:
        """Return a row with the first of the elements that are equal to each."""
        if equality is None:
            return row
        if (row, equality) not in self._first:
            vector = self.rows[row]
            inside = vector >= 0
            result = vector.copy()
            result[inside] = self.rows[equality][vector[inside]]
            self._first[row, equality] = self.row(result)
        return self._first[row, equality]

    def is_finer(self, equality: int | None, other: int | None) -> bool:
        """Whether elements that are equal by an equality are equal by another, too."""
        if equality is None or equality == other:
            return True
        return other is not None and self.first(equality, other) == other

    def padded(self, row: int, size: int) -> int:
        """Return a row with padding after its elements, up to a size."""
        vector = self.rows[row]
        if len(vector) == size:
            return row
        if (row, size) not in self._padded:
            self._padded[row, size] = self.row(np.concatenate([vector, np.full(size - len(vector), PADDING)]))
        return self._padded[row, size]

    def both(self, equality: int | None, other: int | None) -> int | None:
        """Return the equality of elements that are equal by both of two."""
        if self.is_finer(equality, other):
            return equality
        if self.is_finer(other, equality) or equality is None or other is None:
            return other
        pairs = np.stack([self.rows[equality], self.rows[other]], axis=1)
        _, firsts, classes = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        return self.equality(firsts[classes.reshape(-1)])

    def equality(self, firsts: Vector) -> int | None:
        """Return the equality of a dim with the first element that is equal to each; None if no two are."""
        number = self.row(firsts)
        return None if number == self.range(len(firsts)) else number

    def has_elements(self, row: int) -> bool:
        """Whether a row contains elements, rather than padding alone."""
        if row not in self._has:
            vector = self.rows[row]
            self._has[row] = len(vector) > 0 and bool(vector.max() >= 0)
        return self._has[row]

    def is_padded(self, row: int) -> bool:
        """Whether a row contains padding."""
        vector = self.rows[row]
        return len(vector) > 0 and bool(vector.min() < 0)

    def intervals(self, row: int) -> list[tuple[int, int]]:
        """Return the elements of a row without padding, as intervals of consecutive ones in the order of the row."""
        if row not in self._intervals:
            vector = self.rows[row][self.rows[row] >= 0]
            parts = np.split(vector, np.flatnonzero(np.diff(vector) != 1) + 1) if len(vector) else []
            found = [(int(part[0]), int(part[-1]) + 1) for part in parts]
            self._intervals[row] = found
        return self._intervals[row]

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

    def varies(self, rows: Sequence[int | None]) -> tuple[int, ...]:
        """Return the axes along which rows, one for each device, differ; None is no row."""
        axes = []
        for axis in range(len(self.mesh.shape)):
            if any(len({rows[position] for position in group} - {None}) > 1 for group in self.along((axis,))):
                axes.append(axis)
        return tuple(axes)


def digits(vector: Vector, sizes: Sequence[int], lengths: Sequence[int | None]) -> Iterator[list[Vector]]:
    """Iterate over the elements that factors of a dim may have, whose products are a row with elements.

    `sizes` are those of the factors, outermost first, and `lengths` the numbers of their elements on the device, None
    for one that is not known. A row of padding of a factor is padding in the dim.
    """
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    padded = vector < 0
    for shape in _shapes(len(vector), lengths):
        table, mask = vector.reshape(shape), padded.reshape(shape)
        rows = []
        for factor, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            digit = np.moveaxis(np.where(mask, PADDING, table // stride % size), factor, 0)
            rows.append(digit.reshape(shape[factor], -1).max(axis=1))
        if np.array_equal(composed(rows, sizes), vector):
            yield rows


def composed(rows: Sequence[Vector], sizes: Sequence[int]) -> Vector:
    """Return the row of a dim from those of its factors, outermost first: the inverse of `digits`."""
    result = np.zeros(1, np.int64)
    for row, size in zip(rows, sizes, strict=True):
        total = result[:, None] * size + row
        negative = (result[:, None] < 0) | (row < 0)
        result = np.where(negative, PADDING, total).reshape(-1)
    return result


def _shapes(count: int, lengths: Sequence[int | None]) -> Iterator[tuple[int, ...]]:
    """Iterate over the sizes of `count` elements in as many dims as there are lengths; outer ones are small first."""
    if not lengths:
        if count == 1:
            yield ()
        return
    first, *others = lengths
    for size in range(1, count + 1) if first is None else (first,):
        if size and count % size == 0:
            yield from ((size, *shape) for shape in _shapes(count // size, others))
