"""Pieces whose padding is zero, as terms of sums: each element is on one device, and zeros are added for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from distir_relax.proof.pieces import Groups, Piece, Tables


def as_terms(tables: Tables, piece: Piece, groups: Groups, axes: Sequence[int]) -> Piece:
    """Return a piece as terms of sums, if devices along axes have each element at most once, others zeros there."""
    for dim, axis in product(range(len(piece.dims)), axes):
        rows = tables.tables[piece.dims[dim]]
        if piece.routed is not None or piece.fills[dim] != 0.0 or not any(map(tables.is_padded, set(rows))):
            continue
        parts = [tables.tables[table] for table in piece.dims]
        nothing = {i for part in parts for i, row in enumerate(part) if not len(tables.rows[row])}
        nothing |= piece.zeros
        if piece.pending[axis] == "sum":
            for group in groups.along((axis,)):
                zeros = {i for i in group if i not in nothing and not tables.has_elements(rows[i])}
                if zeros and not (zeros | nothing).issuperset(group):
                    piece = replace(piece, zeros=piece.zeros | zeros)
            continue
        held, others = [], []
        for group in groups.along((axis,)):
            if nothing.issuperset(group):
                others.append(group)
            else:
                held.append([i for i in group if i not in piece.zeros])
        whole = _united(tables, rows, held, others) if axis in groups.varies(rows) else None
        if whole is not None and not piece.pending[axis]:
            pending = (*piece.pending[:axis], "sum", *piece.pending[axis + 1 :])
            dims = [_of_others(tables, table, rows, held) for table in piece.dims]
            piece = replace(piece, dims=(*dims[:dim], whole, *dims[dim + 1 :]), pending=pending)
    return piece


def _of_others(tables: Tables, table: int, padded: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """Return the table of a dim of a tensor of which some devices have zeros only, those of any elements.

    `padded` are the rows of the dim with padding. Devices without elements get the row of one in their group that
    has some.
    """
    rows = list(tables.tables[table])
    for group in groups:
        others = [rows[position] for position in group if tables.has_elements(padded[position])]
        for position in group if others else ():
            if not tables.has_elements(padded[position]):
                rows[position] = others[0]
    return tables.table(rows)


def _united(
    tables: Tables, rows: Sequence[int], groups: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
) -> int | None:
    """Return the table of the elements that a group has together, each at its place on one device at most.

    In the groups `others`, devices have no element of the tensor, so that any rows are right: those without padding
    remain so if other dims are padded.
    """
    united = list(rows)
    for number, group in enumerate((*groups, *others)):
        vectors = [tables.rows[rows[position]] for position in group]
        stacked = np.stack(vectors) if len({len(vector) for vector in vectors}) == 1 else None
        if number < len(groups) and (stacked is None or ((stacked >= 0).sum(axis=0) > 1).any()):
            return None
        if stacked is not None:
            row = tables.row(stacked.max(axis=0))
            for position in group:
                united[position] = row
    return tables.table(united)
