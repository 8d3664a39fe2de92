"""Formatting of times, sizes and counts with their units."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def seconds(value: float) -> str:
    """Format a time in seconds, to four digits: ``42.43 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


def size(value: float) -> str:
    """Format a number of bytes, to three digits, in powers of 1000: ``1.22 GB``."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


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


def rate(value: float) -> str:
    """Format a rate per second, to four digits: ``76,800/s``."""
    return f"{float(f'{value:.4g}'):,.0f}/s" if value >= 1000 else f"{value:.4g}/s"
