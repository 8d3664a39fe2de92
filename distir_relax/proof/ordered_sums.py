"""Sums in a stated order: terms of a sum that are moved are tensors of their own, until an op adds all of them."""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ir import Op
from distir_relax.ops.table.positions import Positions
from distir_relax.proof.elements import Elements
from distir_relax.proof.layouts import Layouts
from distir_relax.proof.pieces import Groups, Mismatch, Piece
from distir_relax.proof.terms import same_positions


class OrderedSums:
    """The terms of sums that devices send to each other."""

    def __init__(self, layouts: Layouts, elements: Elements) -> None:
        self.layouts = layouts
        self.elements = elements
        self.terms = layouts.terms
        self.tables = layouts.tables

    def as_shares(self, piece: Piece, axis: int, groups: Groups) -> Piece:
        """Return a piece of the terms of a pending sum along an axis: each is a tensor of its own (`_Terms.share`)."""
        if not piece.dims or piece.routed is not None:
            raise Mismatch("it moves a term of a sum that has no dims, or rows by data")
        positions = []
        for i, place in enumerate(groups.coordinates):
            vectors = self.elements.positions(piece, i, True)
            if all(len(vector) for vector in vectors):
                number = sum(int(vector.max()) for vector in vectors)
                term = self.terms.term_at(number) if number >= 0 else None
                if term is None or any((vector < 0).any() for vector in vectors):
                    raise Mismatch("it moves padding of a term of a sum")
                share = self.terms.share(term, axis, place)
                vectors[0] = vectors[0] + (self.terms.bases[share] - self.terms.bases[term])
            positions.append(vectors)
        dims = tuple(
            self.tables.table(self.tables.row(vectors[dim]) for vectors in positions) for dim in range(len(piece.dims))
        )
        pending = (*piece.pending[:axis], "", *piece.pending[axis + 1 :])
        return Piece(None, dims, pending, piece.fills)

    def sum_in_order(self, op: Op, pieces: Sequence[Piece]) -> Piece:
        """Return the piece of a sum of the terms of the model's sum, each of them whole or its shares in order.

        The sum of the shares of a single tensor is that tensor.
        """
        if any(piece.routed is not None or any(piece.pending) for piece in pieces):
            raise Mismatch("a term of it is a term of another pending sum")
        devices = op.results[0].placed.devices
        if any(value.placed.devices != devices for value in op.operands):
            raise Mismatch("its operands are on other devices")
        found: set[tuple[int, ...]] = set()
        held: list[Positions] = []
        for position, place in enumerate(self.layouts.groups_of(devices).coordinates):
            items = [self._found(piece, position) for piece in pieces]
            if any(not same_positions(vectors, items[0][1]) for _, vectors in items):
                raise Mismatch("it adds different elements")
            held.append(items[0][1])
            found.add(self._added([term for term, _ in items], place))
        terms = found.pop()
        candidates = self.terms.instances.get((op.name, terms), ())
        if found or not (candidates or len(terms) == 1):
            raise Mismatch("the model adds other terms")
        number = candidates[0][1][0] if candidates else terms[0]
        pending, kind = pieces[0].pending, op.results[0].placed
        if not kind.shape:
            return Piece(number, (), pending, ())
        base = self.terms.bases[number]
        positions = [[vectors[0] + base, *vectors[1:]] for vectors in held]
        return self.elements.piece(positions, None, pending, (None,) * len(kind.shape), kind)

    def _added(self, terms: Sequence[int], place: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensors whose terms, or shares of them in order, a device adds; it has these coordinates."""
        added = []
        remaining = list(terms)
        while remaining:
            term, count = remaining[0], 1
            if term in self.terms.shares:
                term, axis, _ = self.terms.shares[term]
                count = self.layouts.mesh.shape[axis]
                of_group = [(*place[:axis], i, *place[axis + 1 :]) for i in range(count)]
                if remaining[:count] != [self.terms.share(term, axis, other) for other in of_group]:
                    raise Mismatch("the terms of a sum are not each there once, in order")
            added.append(term)
            remaining = remaining[count:]
        return tuple(added)

    def _found(self, piece: Piece, position: int) -> tuple[int, Positions]:
        """Return the tensor of which a device has elements, and their positions in it."""
        if not piece.dims:
            assert piece.term is not None
            return piece.term, []
        vectors = self.elements.positions(piece, position, True)
        if not all(len(vector) and vector.min() >= 0 for vector in vectors):
            raise Mismatch("a term of it has padding, or no elements")
        term = self.terms.term_at(sum(int(vector[0]) for vector in vectors))
        vectors[0] = vectors[0] - self.terms.bases[term]
        last = sum(int(vector.max()) for vector in vectors)
        if sum(int(vector.min()) for vector in vectors) < 0 or last >= max(1, self.terms.types[term].elements):
            raise Mismatch("a term of it is no part of one tensor")
        return term, vectors
