"""Plain-text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return a line for each row, all of equal length: the columns `left` flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in cells).rstrip()

    return [line(row) for row in rows]
