"""Who holds which elements behind ops that move them: their numbers are followed from device to device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distir_relax.ir import Attribute, Op, PlacedType, Value
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import PADDING, Positions, Vector
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.proof.pieces import Layout, Mismatch, Piece
from distir_relax.proof.terms import Terms, stride_of


class Elements:
    """The elements of `terms`, by their numbers in one tensor, or in all of them."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.tables = terms.tables
        self._vectors: dict[tuple[int, int, int, int | None], Vector] = {}
        self._origins: dict[int, tuple[int, int, int, int | None]] = {}
        """The row, distance, size and equality that each of these vectors, by its identity, is made of."""
        self._moved: dict[object, list[tuple[int, Layout]]] = {}

    def moved(self, op: Op, entry: OpDef, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of the results of an op on each device that moves elements."""
        (first, *others) = pieces
        if first.term is None or any(piece.term != first.term for piece in others):
            return self._moved_pieces(op, entry, pieces)
        # Layers move tensors of the same shape alike.
        terms = [first.term, *self.terms.shapes.get(first.term, ())]
        key = (
            op.name, repr(op.attrs), tuple(piece.layout for piece in pieces),
            *(value.placed for value in (*op.operands, *op.results)),
            *((self.terms.types[term].shape, self.terms.equalities[term]) for term in terms),
        )  # fmt: skip
        if key not in self._moved:
            results = self._moved_pieces(op, entry, pieces)
            found = [(terms.index(piece.term), piece.layout) for piece in results if piece.term in terms]
            if len(found) < len(results):
                return results
            self._moved[key] = found
        return [layout.of(terms[number]) for number, layout in self._moved[key]]

    def _moved_pieces(self, op: Op, entry: OpDef, pieces: Sequence[Piece]) -> list[Piece]:
        devices = op.results[0].placed.devices
        if len({piece.pending for piece in pieces}) > 1:
            raise Mismatch("only some of its operands are terms of a pending reduction")
        mixed = len({piece.term for piece in pieces}) > 1
        places = [{d: i for i, d in enumerate(value.placed.devices)} for value in op.operands]
        made: dict[object, list[Positions]] = {}
        moved = []
        for position, device in enumerate(devices):
            held = [(piece, place[device]) for piece, place in zip(pieces, places, strict=True) if device in place]
            attrs = local_attrs(op.attrs, position)
            key = (tuple((p.term, *(self.tables.tables[t][i] for t in p.dims)) for p, i in held), repr(attrs))
            if key not in made:
                parts = [self.positions(piece, i, mixed) for piece, i in held]
                shapes = [value.placed.local(position).shape for value in op.results]
                made[key] = self.apply(entry, parts, attrs, shapes)
            moved.append(made[key])
        zeros = self._zeros_of_all(pieces, places, devices)
        columns = zip(op.results, zip(*moved, strict=True), strict=True)
        results = [replace(self._of_moved(op, pieces, value, column), zeros=zeros) for value, column in columns]
        return [self.still_routed(pieces, result) for result in results]

    @staticmethod
    def still_routed(pieces: Sequence[Piece], result: Piece) -> Piece:
        """Return the piece of elements moved from pieces with the rows that devices have by data."""
        routed = pieces[0].routed
        if any(piece.routed is not None for piece in pieces) and (len(pieces) > 1 or result.term != pieces[0].term):
            raise Mismatch("it needs all rows, of which devices have some by data")
        return replace(result, routed=routed)

    @staticmethod
    def apply(
        entry: OpDef, parts: Sequence[Positions], attrs: Mapping[str, Attribute], shapes: Sequence[tuple[int, ...]]
    ) -> list[Positions]:
        """Return the positions of results of these shapes; those of a result without elements may be any."""
        assert entry.semantics.moved is not None
        try:
            return entry.semantics.moved(parts, attrs)
        except ValueError as error:
            if all(0 in shape for shape in shapes):
                return [[np.arange(size) for size in shape] for shape in shapes]
            raise Mismatch(str(error)) from None

    def positions(self, piece: Piece, position: int, absolute: bool) -> Positions:
        """Return the numbers of the elements of a piece on one device; with `absolute` among those of all tensors."""
        return self.positions_of(piece.term, [self.tables.tables[table][position] for table in piece.dims], absolute)

    def positions_of(self, term: int | None, rows: Sequence[int], absolute: bool) -> Positions:
        """Return the numbers of the elements in these rows of a tensor; see `positions`."""
        if term is None:
            return [self.tables.rows[row] for row in rows]
        shape, equalities = self.terms.types[term].shape, self.terms.equalities[term]
        result = [self._spaced(row, stride_of(shape, dim), shape[dim], equalities[dim]) for dim, row in enumerate(rows)]
        if absolute and result:
            base = self.terms.bases[term]
            result[0] = np.where(result[0] >= 0, result[0] + base, result[0])
        return result

    def piece(
        self,
        positions: Sequence[Positions],
        term: int | None,
        pending: tuple[str, ...],
        fills: tuple[float | None, ...],
        kind: PlacedType,
    ) -> Piece:
        """Return the piece of elements with these numbers on each device: those of `term`, or of all tensors."""
        base = 0
        if term is None:
            numbers = [sum(int(v[0]) for v in vectors) for vectors in positions if all(len(v) for v in vectors)]
            term = self.terms.term_at(min(numbers)) if numbers and min(numbers) >= 0 else None
            base = self.terms.bases[term] if term is not None else 0
        for number in [] if term is None else [term, *self.terms.shapes.get(term, ())]:
            rows = self._rows(positions, number, base)
            if rows is not None:
                dims = tuple(self.tables.table(column) for column in zip(*rows, strict=True))
                return Piece(number, dims, pending, fills)
        if term is not None and base == 0:
            # The numbers of a known tensor, in other dims than its own.
            base = self.terms.bases[term]
            positions = [[vectors[0] + base, *vectors[1:]] if vectors else vectors for vectors in positions]
        tables = tuple(
            self.tables.table(self.tables.row(vectors[dim]) for vectors in positions) for dim in range(len(kind.shape))
        )
        return Piece(None, tables, pending, fills)

    def _of_moved(self, op: Op, pieces: Sequence[Piece], value: Value, result: Sequence[Positions]) -> Piece:
        """Return the piece of elements of pieces that an op moved to these positions."""
        if not value.placed.shape:
            return self._scalar(pieces[0], pieces[0].pending)
        value_of_padding = op.attrs.get("value")
        fills = [
            self._common_fill([p.fills[dim] for p in pieces if dim < len(p.fills)]) for dim in range(len(result[0]))
        ]
        for dim in range(len(result[0])):
            if any((positions[dim] < 0).any() for positions in result):
                was_padded = any((vector < 0).any() for vector in self._padded(pieces, dim))
                if isinstance(value_of_padding, (int, float)) and self._adds_padding(op, pieces, dim, result):
                    new = float(value_of_padding)
                    fills[dim] = new if not was_padded or fills[dim] == new else None
                elif not was_padded:
                    fills[dim] = None
        term = pieces[0].term if len({piece.term for piece in pieces}) == 1 else None
        return self.piece(result, term, pieces[0].pending, tuple(fills), value.placed)

    @staticmethod
    def _zeros_of_all(
        pieces: Sequence[Piece], places: Sequence[Mapping[int, int]], devices: Sequence[int]
    ) -> frozenset[int]:
        """Return the devices that have zeros only of all pieces, of each at its place."""
        return frozenset(
            position
            for position, device in enumerate(devices)
            if all(place.get(device) in piece.zeros for piece, place in zip(pieces, places, strict=True))
        )

    def _adds_padding(self, op: Op, pieces: Sequence[Piece], dim: int, result: Sequence[Positions]) -> bool:
        """Whether an op adds padding along a dim, to the operand's that may be there."""
        if len(pieces) > 1 or len(pieces[0].dims) != len(result[0]):
            return True
        index = {device: i for i, device in enumerate(op.operands[0].placed.devices)}
        rows = self.tables.tables[pieces[0].dims[dim]]
        for device, positions in zip(op.results[0].placed.devices, result, strict=True):
            before, after = self.tables.rows[rows[index[device]]] < 0, positions[dim] < 0
            if after.sum() > before.sum() or (
                after.any() and after.sum() == before.sum() and len(after) != len(before)
            ):
                return True
            if after.sum() == before.sum() and not np.array_equal(after, before):
                return True
        return False

    def _scalar(self, piece: Piece, pending: tuple[str, ...]) -> Piece:
        """Return the piece of the only element of a piece, in no dims."""
        numbers = {sum(int(v[0]) for v in self.positions(piece, i, True)) for i in self._places(piece)}
        if len(numbers) > 1 or min(numbers) < 0:
            raise Mismatch("it is no scalar of the model")
        (number,) = numbers
        term = self.terms.term_at(number)
        scalar = next((n for n in self.terms.shapes.get(term, [term]) if not self.terms.types[n].shape), None)
        if self.terms.bases[term] != number or scalar is None:
            raise Mismatch("it is no scalar of the model")
        return Piece(scalar, (), pending, (), piece.zeros)

    def _places(self, piece: Piece) -> range:
        return range(len(self.tables.tables[piece.dims[0]])) if piece.dims else range(0)

    def _padded(self, pieces: Sequence[Piece], dim: int) -> Iterator[Any]:
        for piece in pieces:
            if dim < len(piece.dims):
                for row in set(self.tables.tables[piece.dims[dim]]):
                    yield self.tables.rows[row]

    @staticmethod
    def _common_fill(fills: Sequence[float | None]) -> float | None:
        return fills[0] if fills and len(set(fills)) == 1 else None

    def _spaced(self, row: int, stride: int, size: int, equality: int | None) -> Vector:
        """Return the numbers of elements of a dim of `size`, which are `stride` apart; equal ones are one object."""
        key = row, stride, size, equality
        if key not in self._vectors:
            vector = self.tables.rows[row]
            self._vectors[key] = np.where(vector >= 0, vector * stride, vector)
            self._origins[id(self._vectors[key])] = key
        return self._vectors[key]

    def _rows(self, positions: Sequence[Positions], term: int, base: int) -> list[list[int]] | None:
        """Return the rows of elements of a tensor on each device; None if its dims are not those of the tensor."""
        if len(positions[0]) != len(self.terms.types[term].shape):
            return None
        made: dict[int, list[int] | None] = {}
        rows = []
        for vectors in positions:
            if id(vectors) not in made:
                made[id(vectors)] = self._regular(vectors, term, base)
            row = made[id(vectors)]
            if row is None:
                return None
            rows.append(row)
        return rows

    def _regular(self, vectors: Positions, term: int, base: int) -> list[int] | None:
        rows: list[int] = []
        has_elements = all(len(vector) for vector in vectors)
        shape = self.terms.types[term].shape
        carried = 0
        for dim, (vector, size, equality) in enumerate(zip(vectors, shape, self.terms.equalities[term], strict=True)):
            stride = stride_of(shape, dim)
            row, *origin = self._origins.get(id(vector), (-1,))
            if origin == [stride, size, equality] and not carried and (base == 0 or dim > 0):
                # An op that moves elements along other dims returns the numbers of this one as they are.
                rows.append(row)
                continue
            inside = vector >= 0
            offset = (vector - (base if dim == 0 else 0) + carried)[inside]
            # Numbers between two elements of this dim are those of the dims within.
            carried = int(offset[0] % stride) if len(offset) else 0
            offset -= carried
            index = offset // stride
            if np.array_equal(index * stride, offset) and not ((index < 0) | (index >= max(size, 1))).any():
                numbers = np.full(len(vector), PADDING)
                numbers[inside] = index
                rows.append(self.tables.first(self.tables.row(numbers), equality))
            elif has_elements:
                return None
            else:
                rows.append(self.tables.range(len(vector)))
        return rows
