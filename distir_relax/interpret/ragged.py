"""Lists of numbers of different lengths as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Ragged:
    """Lists of numbers, one after the other: all `values`, with the `rows` and `columns` that they are in.

    `counts` are the lengths of the rows, `starts` their positions among the values.
    """

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self.counts: IntArray = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        self.starts: IntArray = np.cumsum(self.counts) - self.counts
        total = int(self.counts.sum())
        self.values: IntArray = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=total)
        self.rows: IntArray = np.repeat(np.arange(len(lists)), self.counts)

    @property
    def columns(self) -> IntArray:
        """The position of each value in its row."""
        columns: IntArray = np.arange(len(self.values)) - self.starts[self.rows]
        return columns

    def pairs(self, rows: IntArray, distance: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return for each value of `rows` its row, the value in its place `distance` rows earlier, and itself.

        Those rows must have as many values.
        """
        counts = self.counts[rows]
        columns = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        earlier = np.repeat(self.starts[rows - distance], counts) + columns
        return (
            np.repeat(rows, counts),
            self.values[earlier],
            self.values[np.repeat(self.starts[rows], counts) + columns],
        )
