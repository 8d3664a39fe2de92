"""Values of a request that depend on its sizes alone, such as positions and masks, computed for blocks of positions.

During decode the sizes of a request differ at every step. Rows of the values for a block of positions are those of its
steps: the program computes a position from earlier ones only, so the columns after it are left out. One block serves
all requests that are within it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    import torch

BLOCK = 64
"""Positions of a block."""
_MAX_BLOCKS = 64
"""Maximum number of sizes and blocks whose values are kept."""


class SizedValues:
    """The values that `prepare(past, new, last)` computes.

    `dims` has for each value the kind of each of its dims: ``new`` for the new positions, ``all`` for all of them, or
    empty for others. It is None if a value depends on the sizes otherwise: then nothing is taken of a block. `masks`
    are the numbers of the values that are None for one new position if all their elements are true. No sequence is
    longer than `max_length`, if there is a bound.
    """

    def __init__(
        self, prepare: Callable[[int, int, int], Sequence[torch.Tensor]], dims: Sequence[Sequence[str]] | None,
        masks: Collection[int], max_length: int | None,
    ) -> None:  # fmt: skip
        self._prepare = prepare
        self._dims = dims
        self._masks = masks
        self._max_length = max_length
        self._exact = lru_cache(_MAX_BLOCKS)(self._of_sizes)
        self._block = lru_cache(_MAX_BLOCKS)(self._of_block)

    def of(self, past: int, new: int, last: int) -> Sequence[torch.Tensor | None]:
        """Return the values for a request of these sizes."""
        first = past - past % BLOCK
        block = None if self._dims is None or past + new > first + BLOCK else self._block(first)
        if block is None or self._dims is None:
            return self._exact(past, new, last)
        values, all_true = block
        row = past - first
        return [
            None
            if new == 1 and all_true[number][row : row + 1] == [True]
            else self._part(x, dims, row, new, past + new)
            for number, (x, dims) in enumerate(zip(values, self._dims, strict=True))
        ]

    def _of_sizes(self, past: int, new: int, last: int) -> Sequence[torch.Tensor | None]:
        values = self._prepare(past, new, last)
        return [None if new == 1 and n in self._masks and bool(x.all()) else x for n, x in enumerate(values)]

    def _of_block(self, first: int) -> tuple[Sequence[torch.Tensor], list[list[bool]]] | None:
        """Return the values of a block, and for each mask whether the columns up to a row's position are true.

        None if the program has no such positions, whose table of embeddings ends within the block.
        """
        assert self._dims is not None
        count = BLOCK if self._max_length is None else min(BLOCK, self._max_length - first)
        try:
            values = self._prepare(first, count, 0)
        except (DistIRError, RuntimeError, IndexError):
            return None
        return values, [
            _rows_all_true(x, dims, first) if n in self._masks else []
            for n, (x, dims) in enumerate(zip(values, self._dims, strict=True))
        ]

    def _part(self, x: torch.Tensor, dims: Sequence[str], start: int, new: int, total: int) -> torch.Tensor:
        for dim, kind in enumerate(dims):
            if kind:
                x = x.narrow(dim, start, new) if kind == "new" else x.narrow(dim, 0, total)
        return x


def _rows_all_true(mask: torch.Tensor, dims: Sequence[str], first: int) -> list[bool]:
    """Return for each new position of a mask whether it is true for all positions up to that one."""
    if sorted(filter(None, dims)) != ["all", "new"]:
        return []
    rows = mask.movedim((dims.index("new"), dims.index("all")), (0, 1)).flatten(2 if mask.dim() > 2 else 1)
    return [bool(row[: first + n + 1].all()) for n, row in enumerate(rows)]
