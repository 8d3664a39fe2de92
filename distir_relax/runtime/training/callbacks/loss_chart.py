"""Line chart of numbers in a terminal, drawn with braille characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character, by column and row of its dots."""


def line_chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return `height` lines of `width` characters that show finite values from left to right, without axes.

    A character has 2 x 4 dots; there are at most two values for each character of a line.
    """
    low, high = min(values), max(values)
    last = 4 * height - 1
    rows = [round((high - value) / (high - low) * last) if high > low else last // 2 for value in values]
    cells = [[0] * width for _ in range(height)]
    for column, (before, row) in enumerate(pairwise([rows[0], *rows])):
        # Each column is joined to the one before, so that steep parts have no gaps.
        for dot in range(min(before, row), max(before, row) + 1):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


class History:
    """The values of a series, of which at most `most` means of consecutive ones are kept."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._size = 1
        """Number of values of which each kept one is the mean."""
        self._kept: list[float] = []
        self._rest: list[float] = []

    def add(self, value: float) -> None:
        """Append a value, unless it is not finite."""
        if not math.isfinite(value):
            return
        self._rest.append(value)
        if len(self._rest) == self._size:
            self._kept.append(sum(self._rest) / self._size)
            self._rest = []
        if len(self._kept) >= self._most:
            pairs = zip(self._kept[::2], self._kept[1::2], strict=False)
            self._kept = [(a + b) / 2 for a, b in pairs]
            self._size *= 2

    def means(self, most: int) -> list[float]:
        """Return the values so far in order, or `most` means of consecutive ones."""
        values = [*self._kept, *([sum(self._rest) / len(self._rest)] if self._rest else [])]
        number = min(most, len(values))
        bounds = [round(i * len(values) / number) for i in range(number + 1)] if number else []
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
