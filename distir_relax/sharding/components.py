"""Connected components of a graph on numbered nodes, whose edges are arrays: union-find for many equal ops at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Edges = tuple[IntArray, IntArray]
"""The first and the second nodes of edges."""


def components(count: int, edges: Iterable[Edges]) -> IntArray:
    """Return the smallest node of the component of each of `count` nodes.

    Roots are hooked to smaller ones and paths halved until nothing changes (Shiloach and Vishkin, 1982), in array
    operations: `scipy.sparse.csgraph` has the same, but takes a quarter of a second to import.
    """
    roots = np.arange(count, dtype=np.int64)
    pairs = list(edges)
    if not pairs:
        return roots
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    while True:
        a, b = roots[first], roots[second]
        differ = a != b
        if not differ.any():
            return roots
        first, second, a, b = first[differ], second[differ], a[differ], b[differ]
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(roots, above := roots[roots]):
            roots = above


def equal_rows(rows: IntArray) -> list[IntArray]:
    """Return the numbers of the rows of a matrix, in ascending order, for each distinct row."""
    if len(rows) == 1 or (rows == rows[0]).all():
        return [np.arange(len(rows), dtype=np.int64)]
    order = np.lexsort(rows.T[::-1])
    changes = np.flatnonzero((rows[order[1:]] != rows[order[:-1]]).any(axis=1)) + 1
    return np.split(order, changes)
