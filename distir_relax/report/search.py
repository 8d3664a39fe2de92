"""Results of a strategy search, as a table and as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence

from distir_relax.report.text_table import align_columns
from distir_relax.strategy_search import RULED_OUT, Outcome, Search
from distir_relax.support.units import count, rate, seconds, size

COLUMNS = ("strategy", "samples", "throughput", "step", "memory", "bubble", "communication")


def table(search: Search, top: int = 10) -> str:
    """Return the best results of a search as a table, and the numbers of discarded ones."""
    ranked = search.ranked
    lines = [headline(search), ""]
    if ranked:
        return "\n".join([*lines, outcomes_table(ranked, top), "", *discarded(search)])
    lines += discarded(search)
    if search.too_large:
        least = search.too_large[0]
        lines.append(
            f"nothing fits: {least.strategy} with {count(least.samples, 'sample')} needs least, "
            f"{size(least.memory)} of {memory_text(search)}"
        )
    return "\n".join(lines)


def outcomes_table(outcomes: Sequence[Outcome], top: int) -> str:
    """Return a table of the fastest outcomes that fit."""
    best = sorted((o for o in outcomes if o.fits), key=lambda o: -o.throughput)[:top]
    return "\n".join(align_columns([COLUMNS, *map(cells, best)]))


def csv_text(search: Search) -> str:
    """Return all outcomes as CSV, those that fit first, by decreasing throughput."""
    text = io.StringIO()
    names = ("strategy", "samples", "seconds", "throughput", "memory", "fits", "bubble", "communication", "refused")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for outcome in (*search.ranked, *search.too_large, *search.refused):
        writer.writerow(outcome.as_json())
    return text.getvalue()


def headline(search: Search) -> str:
    """Summarize the search space and the search time."""
    space = search.space
    batches = f"{space.batches[0]} samples" if len(space.batches) == 1 else f"{len(space.batches)} batches"
    resumed = f", {search.resumed} of them resumed" if search.resumed else ""
    return (
        f"{count(len(search.outcomes), 'configuration')} of {count(space.devices, 'device')} on {search.profile.name}, "
        f"{batches}, in {seconds(search.seconds)}{resumed}"
    )


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Return an outcome as a row of the table, under `COLUMNS`."""
    return (
        outcome.strategy, f"{outcome.samples:,}", rate(outcome.throughput), seconds(outcome.seconds),
        size(outcome.memory), f"{outcome.bubble:.1%}", f"{outcome.communication:.1%}",
    )  # fmt: skip


def memory_text(search: Search) -> str:
    """Print the memory of a device, ``80 GB``, as a range for heterogeneous devices."""
    sizes = sorted({memory for _, memory in search.profile.device_specs(search.space.devices)})
    return size(sizes[0]) + (f" to {size(sizes[-1])}" if len(sizes) > 1 else "")


def discarded(search: Search) -> list[str]:
    """Summarize strategies that do not fit, are ruled out, cannot be compiled, or were not tried, with reasons."""
    lines = []
    if large := search.too_large:
        need = f"{size(large[0].memory)} to {size(large[-1].memory)}" if len(large) > 1 else size(large[0].memory)
        lines.append(f"{len(large):,} do not fit into {memory_text(search)}: they need {need}")
    for reason, number in _reasons(search.refused):
        lines.append(f"{number:,} {'were ruled out' if reason in RULED_OUT else 'cannot be compiled'}: {reason}")
    if search.untried:
        lines.append(f"{search.untried:,} were not tried")
    return lines or ["all fit"]


def _reasons(refused: Sequence[Outcome]) -> list[tuple[str, int]]:
    return Counter(outcome.refused for outcome in refused).most_common(5)
