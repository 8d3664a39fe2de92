"""Results of a search for generation, as a table."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from distir_relax.report.text_table import align_columns
from distir_relax.strategy_search.generation import GenerationOutcome, GenerationSearch
from distir_relax.support.units import count, rate, seconds, size

COLUMNS = ("strategy", "replicas", "tokens/s", "first token", "each token", "memory", "idle")


def table(search: GenerationSearch, top: int = 10) -> str:
    """Return the best results as a table, and the numbers of discarded ones, with reasons."""
    ranked = search.ranked[:top]
    lines = [
        f"{count(len(search.outcomes), 'configuration')} of {count(search.devices, 'device')} on {search.profile}, by "
        f"{search.objective.replace('-', ' ')}, in {seconds(search.seconds)}"
    ]
    if ranked:
        lines += ["", *align_columns([COLUMNS, *map(_cells, ranked)])]
        best, others = ranked[0].devices, [outcome for outcome in search.ranked if len(outcome.devices) != 1]
        if len(best) == 1 and others:
            lines += ["", f"device {best[0]} alone is faster than all {search.devices} devices together: use it alone"]
    if large := search.too_large:
        least = min(map(_memory, large))
        lines += ["", f"{len(large):,} do not fit into memory: they need {size(least)} or more on a device"]
    for reason, number in Counter(outcome.refused for outcome in search.refused).most_common(5):
        lines.append(f"{number:,} refused: {reason}")
    return "\n".join(lines)


def _cells(outcome: GenerationOutcome) -> tuple[str, ...]:
    found = outcome.simulation
    assert found is not None, "only what was simulated is in the table"
    each = "" if found.per_token is None else seconds(fmean(found.per_token))
    place = f" on {','.join(map(str, outcome.devices))}" if outcome.devices else ""
    return (
        outcome.strategy + place, f"{outcome.replicas:,}", rate(outcome.throughput).removesuffix("/s"),
        seconds(fmean(found.first_token)), each, size(_memory(outcome)), f"{fmean(found.idle):.0%}",
    )  # fmt: skip


def _memory(outcome: GenerationOutcome) -> int:
    """Return the most that weights and states take on a device."""
    found = outcome.simulation
    return 0 if found is None else max(w + c for w, c in zip(found.weights, found.cache, strict=True))
