"""What a search found: a table for people, and one for other programs."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence

from distir_relax.planner import Outcome, Search
from distir_relax.units import count, seconds, size

COLUMNS = ("strategy", "samples", "throughput", "step", "memory", "bubble", "communication")


def table(search: Search, top: int = 10) -> str:
    """The best of a search, and what became of the others."""
    ranked = search.ranked
    lines = [_head(search), ""]
    if ranked:
        return "\n".join([*lines, outcomes_table(ranked, top), "", *_discarded(search)])
    lines += _discarded(search)
    if search.too_large:
        least = search.too_large[0]
        lines.append(
            f"nothing fits: {least.strategy} with {count(least.samples, 'sample')} needs least, "
            f"{size(least.memory)} of {size(search.profile.memory)}"
        )
    return "\n".join(lines)


def outcomes_table(outcomes: Sequence[Outcome], top: int) -> str:
    """The fastest of outcomes that fit."""
    best = sorted((o for o in outcomes if o.fits), key=lambda o: -o.throughput)[:top]
    rows = [COLUMNS, *map(_row, best)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells))

    return "\n".join(map(line, rows))


def csv_text(search: Search) -> str:
    """All outcomes, one a line, the fastest that fit first."""
    text = io.StringIO()
    names = ("strategy", "samples", "seconds", "throughput", "memory", "fits", "bubble", "communication", "refused")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for outcome in (*search.ranked, *search.too_large, *search.refused):
        writer.writerow(outcome.as_json())
    return text.getvalue()


def _head(search: Search) -> str:
    space = search.space
    batches = f"{space.batches[0]} samples" if len(space.batches) == 1 else f"{len(space.batches)} batches"
    known = f", {search.known} of them known before" if search.known else ""
    return (
        f"{count(len(search.outcomes), 'configuration')} of {count(space.devices, 'device')} on {search.profile.name}, "
        f"{batches}, in {seconds(search.seconds)}{known}"
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.strategy, f"{outcome.samples:,}", f"{outcome.throughput:,.4g}/s", seconds(outcome.seconds),
        size(outcome.memory), f"{outcome.bubble:.1%}", f"{outcome.communication:.1%}",
    )  # fmt: skip


def _discarded(search: Search) -> list[str]:
    lines = []
    if large := search.too_large:
        need = f"{size(large[0].memory)} to {size(large[-1].memory)}" if len(large) > 1 else size(large[0].memory)
        lines.append(f"{len(large):,} do not fit into {size(search.profile.memory)}: they need {need}")
    lines += [f"{number:,} cannot be compiled: {reason}" for reason, number in _reasons(search.refused)]
    return lines or ["all fit"]


def _reasons(refused: Sequence[Outcome]) -> list[tuple[str, int]]:
    return Counter(outcome.refused for outcome in refused).most_common(5)
