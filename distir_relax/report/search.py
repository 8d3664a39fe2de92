"""What a search found: a table for people, and one for other programs."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence

from distir_relax.report.text_table import aligned
from distir_relax.strategy_search import RULED_OUT, Outcome, Search
from distir_relax.support.units import count, rate, seconds, size

COLUMNS = ("strategy", "samples", "throughput", "step", "memory", "bubble", "communication")


def table(search: Search, top: int = 10) -> str:
    """The best of a search, and what became of the others."""
    ranked = search.ranked
    lines = [headline(search), ""]
    if ranked:
        return "\n".join([*lines, outcomes_table(ranked, top), "", *discarded(search)])
    lines += discarded(search)
    if search.too_large:
        least = search.too_large[0]
        lines.append(
            f"nothing fits: {least.strategy} with {count(least.samples, 'sample')} needs least, "
            f"{size(least.memory)} of {room(search)}"
        )
    return "\n".join(lines)


def outcomes_table(outcomes: Sequence[Outcome], top: int) -> str:
    """The fastest of outcomes that fit."""
    best = sorted((o for o in outcomes if o.fits), key=lambda o: -o.throughput)[:top]
    return "\n".join(aligned([COLUMNS, *map(cells, best)]))


def csv_text(search: Search) -> str:
    """All outcomes, one a line, the fastest that fit first."""
    text = io.StringIO()
    names = ("strategy", "samples", "seconds", "throughput", "memory", "fits", "bubble", "communication", "refused")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for outcome in (*search.ranked, *search.too_large, *search.refused):
        writer.writerow(outcome.as_json())
    return text.getvalue()


def headline(search: Search) -> str:
    """What was searched, and how long it took."""
    space = search.space
    batches = f"{space.batches[0]} samples" if len(space.batches) == 1 else f"{len(space.batches)} batches"
    resumed = f", {search.resumed} of them resumed" if search.resumed else ""
    return (
        f"{count(len(search.outcomes), 'configuration')} of {count(space.devices, 'device')} on {search.profile.name}, "
        f"{batches}, in {seconds(search.seconds)}{resumed}"
    )


def cells(outcome: Outcome) -> tuple[str, ...]:
    """An outcome as a row of the table, under `COLUMNS`."""
    return (
        outcome.strategy, f"{outcome.samples:,}", rate(outcome.throughput), seconds(outcome.seconds),
        size(outcome.memory), f"{outcome.bubble:.1%}", f"{outcome.communication:.1%}",
    )  # fmt: skip


def room(search: Search) -> str:
    """What a device of the search has, ``80 GB``; from the least to the most where they are unlike."""
    found = sorted({memory for _, memory in search.profile.device_specs(search.space.devices)})
    return size(found[0]) + (f" to {size(found[-1])}" if len(found) > 1 else "")


def discarded(search: Search) -> list[str]:
    """How many do not fit, were ruled out or cannot be compiled, and why; how many were not tried."""
    lines = []
    if large := search.too_large:
        need = f"{size(large[0].memory)} to {size(large[-1].memory)}" if len(large) > 1 else size(large[0].memory)
        lines.append(f"{len(large):,} do not fit into {room(search)}: they need {need}")
    for reason, number in _reasons(search.refused):
        lines.append(f"{number:,} {'were ruled out' if reason in RULED_OUT else 'cannot be compiled'}: {reason}")
    if search.untried:
        lines.append(f"{search.untried:,} were not tried")
    return lines or ["all fit"]


def _reasons(refused: Sequence[Outcome]) -> list[tuple[str, int]]:
    return Counter(outcome.refused for outcome in refused).most_common(5)
