"""Rows that devices have by data: they are the model's on the devices of their groups, such as experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distir_relax.ir import Op, TensorType
from distir_relax.ops import Routing
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.proof.layouts import Layouts
from distir_relax.proof.local_ops import Instance
from distir_relax.proof.pieces import Groups, Layout, Mismatch, Piece, Routed


class RoutedRows:
    """The pieces of rows that ops send to the devices of their groups, and of what these compute from them."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.terms = layouts.terms
        self.tables = layouts.tables

    def of_results(
        self,
        routing: Routing,
        instance: Instance,
        layouts: Sequence[Layout],
        ids: int | None,
        made: Sequence[Layout],
        groups: Groups,
    ) -> list[Layout]:
        """Return the layouts of the results of an op on rows that devices have by data.

        It leaves zeros in rows of other groups, so that its result is a term of a sum over the groups, too.
        """
        own = Routed(0, -1 if ids is None else ids, layouts[-1].dims[0])
        routed = {replace(layout.routed, dim=0) for layout in layouts if layout.routed is not None}
        if routed - {own} or (routed and routing is Routing.DISPATCH):
            raise Mismatch("devices have the rows of other groups")
        is_whole = self._have_all(own.groups, instance.operands[-1])
        if routing is Routing.COMBINE or is_whole or (routing is Routing.WITHIN and not routed):
            return list(made)
        axes = groups.varies(self.tables.tables[own.groups])
        factors = [factor.name for factor in instance.rule.factors]
        results = []
        for layout, dims in zip(made, instance.rule.results, strict=True):
            places = [dim for dim, item in enumerate(dims) if [factors[i] for i in item] == ["row"]]
            if places:
                pending = tuple("" if axis in axes else reduction for axis, reduction in enumerate(layout.pending))
                layout = replace(layout, pending=pending, zeros=frozenset(), routed=replace(own, dim=places[0]))
            elif any(layout.pending[axis] for axis in axes):
                raise Mismatch("it needs all rows of its groups")
            results.append(layout)
        return results

    def all_as_routed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the operands of an op on rows by data: of all rows, devices have those of their groups, too."""
        *_, ids, groups = pieces
        if ids.term is None or groups.term is None or self._have_all(groups.dims[0], self.terms.types[groups.term]):
            return list(pieces)
        routed, sent = Routed(0, ids.term, groups.dims[0]), self.terms.routed
        return [
            replace(piece, routed=routed)
            if piece.routed is None and piece.term is not None and groups.term in sent.get((piece.term, routed.ids), ())
            else piece
            for piece in pieces
        ]

    def exchanged(self, op: Op, routing: Routing, rows: Piece, ids: Piece) -> Piece:
        """Return the piece of rows that are sent to the devices of their groups, or back to where they came from."""
        axis = self.layouts.mesh.axes.index(str(op.attrs["axis"]))
        devices = op.results[0].placed.devices
        held = [self.tables.tables[table] for table in rows.dims]
        of_ids = self.tables.tables[ids.dims[0]]
        table = [0] * len(devices)
        result = [list(column) for column in held]
        if rows.term is None or ids.term is None or any(ids.pending) or rows.pending[axis] or ids.routed or ids.zeros:
            raise Mismatch("what it sends by data is not known")
        found = list(self.terms.routed.get((rows.term, ids.term), ()))
        for group in self.layouts.groups_of(devices).along((axis,)):
            attrs: Mapping[str, Any] = local_attrs(op.attrs, group[0])
            ranges = [self.tables.range(last - first, first) for first, last in attrs["groups"]]
            ends = np.cumsum(attrs["sizes"])
            whole = self.tables.rows[of_ids[group[0]]]
            if len({of_ids[i] for i in group}) > 1 or any(len({row[i] for i in group}) > 1 for row in held[1:]):
                raise Mismatch("devices know the groups of other rows")
            if len(ends) != len(group) or ends[-1] != len(whole):
                raise Mismatch("it sends other numbers of rows")
            for position, own, end, size in zip(group, ranges, ends, attrs["sizes"], strict=True):
                part = self.tables.row(whole[end - size : end])
                before, after = (part, of_ids[position]) if routing is Routing.DISPATCH else (of_ids[position], part)
                equality = self.terms.equalities[rows.term][0]
                if held[0][position] != self.tables.first(before, equality):
                    raise Mismatch("it sends other rows than those of which it knows the groups")
                result[0][position], table[position] = self.tables.first(after, equality), own
            owned = np.sort(np.concatenate([self.tables.rows[row] for row in ranges]))
            found = [number for number in found if np.array_equal(owned, np.arange(self.terms.types[number].elements))]
        routed = Routed(0, ids.term, self.tables.table(table))
        if rows.routed != (None if routing is Routing.DISPATCH else routed):
            raise Mismatch("devices have the rows of other groups")
        if not found:
            raise Mismatch("the model sends no such rows")
        dims = tuple(map(self.tables.table, result))
        return Piece(
            rows.term, dims, rows.pending, (None,) * len(dims), frozenset(),
            routed if routing is Routing.DISPATCH else None,
        )  # fmt: skip

    def _have_all(self, table: int, groups: TensorType) -> bool:
        """Whether all devices have all groups, and so all rows."""
        whole = self.tables.range(groups.elements)
        return all(row == whole for row in self.tables.tables[table])
