"""Formatting of times, sizes and counts with their units, and reading of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Units of time, in seconds."""
SIZES = {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
"""Units of size, in bytes."""


def seconds(value: float) -> str:
    """Format a time in seconds, to four digits: ``42.43 ms``."""
    unit, scale = next((item for item in TIMES.items() if value >= item[1]), ("ns", 1e-9))
    return f"{value / scale:.4g} {unit}"


def size(value: float) -> str:
    """Format a number of bytes, to three digits, in powers of 1000: ``1.22 GB``."""
    unit, scale = next((item for item in SIZES.items() if value >= item[1]), ("B", 1.0))
    return f"{value:.0f} B" if unit == "B" else f"{value / scale:.3g} {unit}"


def change(new: float, old: float, unit: Callable[[float], str]) -> str:
    """Format a difference with its sign and unit: ``-1.2 ms``; 0 if the values differ by rounding alone."""
    more = new - old
    if abs(more) <= 1e-9 * max(abs(new), abs(old)):
        return "0"
    return f"{'-' if more < 0 else '+'}{unit(abs(more))}"


def count(number: int, what: str) -> str:
    """Format a count: ``1 device``, ``4,096 devices``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(texts: Sequence[str], most: int) -> str:
    """List the first `most` texts, and the number of the others: ``a, b, c and 4 more``; empty for none."""
    shown = ", ".join(texts[:most])
    return f"{shown} and {len(texts) - most} more" if len(texts) > most else shown


def consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers: 0 to 3 and 7 to 7 of ``0, 1, 2, 3, 7``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def rate(value: float) -> str:
    """Format a rate per second, to four digits: ``76,800/s``."""
    return f"{float(f'{value:.4g}'):,.0f}/s" if value >= 1000 else f"{value:.4g}/s"


def read_quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number with one of `units` or none: ``40GB``, ``2.5 us``, ``3e-6``; None for another text."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or (match["unit"] and match["unit"] not in units):
        return None
    value = float(match["number"]) * units.get(match["unit"], 1.0)
    return value if math.isfinite(value) else None


_QUANTITY = re.compile(r"(?P<number>\d+(\.\d*)?(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?)\s*(?P<unit>[A-Za-z/]*)", re.ASCII)
