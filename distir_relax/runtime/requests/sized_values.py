"""Values of a request that depend on its sizes alone, such as positions and masks, computed for blocks of positions.

During decode the sizes of a request differ at every step. Rows of the values for a block of positions are those of its
steps: the program computes a position from earlier ones only, so the columns after it are left out. One block serves
all requests that are within it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 64
"""Positions of a block."""
_MAX_BLOCKS = 64
"""Maximum number of sizes and blocks whose values are kept."""


class SizedValues:
    """The values that `prepare(past, new, last)` computes.

    `dims` has for each value the kind of each of its dims: ``new`` for the new positions, ``all`` for all of them, or
    empty for others. It is None if a value depends on the sizes otherwise: then nothing is taken of a block. No
    sequence is longer than `max_length`, if there is a bound.
    """

    def __init__(
        self, prepare: Callable[[int, int, int], Sequence[torch.Tensor]], dims: Sequence[Sequence[str]] | None,
        max_length: int | None,
    ) -> None:  # fmt: skip
        self._compute = lru_cache(_MAX_BLOCKS)(prepare)
        self._dims = dims
        self._max_length = max_length

    def of(self, past: int, new: int, last: int) -> Sequence[torch.Tensor]:
        """Return the values for a request of these sizes."""
        first = past - past % BLOCK
        if self._dims is None or past + new > first + BLOCK:
            return self._compute(past, new, last)
        count = BLOCK if self._max_length is None else min(BLOCK, self._max_length - first)
        values = self._compute(first, count, 0)
        return [self._part(x, dims, past - first, new, past + new) for x, dims in zip(values, self._dims, strict=True)]

    def _part(self, x: torch.Tensor, dims: Sequence[str], start: int, new: int, total: int) -> torch.Tensor:
        for dim, kind in enumerate(dims):
            if kind:
                x = x.narrow(dim, start, new) if kind == "new" else x.narrow(dim, 0, total)
        return x
