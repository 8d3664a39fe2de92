"""Costs of other layouts of a value, for plans with searched placements, as a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distir_relax.autosharding.alternatives import Alternative, Alternatives, Outcome
from distir_relax.ir import DTensorType
from distir_relax.layout import print_placements
from distir_relax.report.layout_text import short_layout, summarize_names
from distir_relax.report.text_table import align_columns
from distir_relax.sharding.factor_selection import Placed
from distir_relax.support.units import change, seconds, size

_HEAD = ("", "a step", "ops", "sending", "memory", "sent", "collectives")


def alternatives_text(
    alternatives: Alternatives, function: str, name: str, kind: DTensorType, limit: float
) -> list[str]:
    """Return the table of costs of a value's layouts, with the cost of its annotations; `kind` is its type.

    The layouts most similar to the chosen one come first; after `limit` seconds no other is evaluated.
    """
    mesh = alternatives.search.mesh
    deadline = time.monotonic() + limit
    layouts = _by_similarity(alternatives.layouts(function, name), kind.placements)
    tried: list[Alternative] = []
    for layout in layouts:
        if tried and time.monotonic() > deadline:
            break
        tried.append(alternatives.best(function, name, layout))
    chosen = tried[0].outcome
    lines = [*_explanation(alternatives, function, name, tried, len(layouts))]
    if chosen is None:
        return [*lines, f"the chosen layout: {tried[0].refused}"]
    rows = [_row(short_layout(replace(kind, placements=r.layout), mesh), r.outcome, chosen) for r in tried if r.outcome]
    # The chosen layout comes first, the others by increasing time.
    times = [a.outcome.seconds for a in tried if a.outcome]
    order = [0, *sorted(range(1, len(rows)), key=times.__getitem__)]
    lines += align_columns([_HEAD, *(rows[i] for i in order)], left=(0, len(_HEAD) - 1))
    lines += [
        f"{short_layout(replace(kind, placements=a.layout), mesh)}: {a.refused}" for a in tried if a.outcome is None
    ]
    if rest := len(layouts) - len(tried):
        lines.append(f"{rest} more layouts were not evaluated in {limit:g} s: raise --limit")
    return lines


def _explanation(
    alternatives: Alternatives, function: str, name: str, results: Sequence[Alternative], count: int
) -> Iterator[str]:
    """Explain a value's layout: symmetry, annotations, a single valid layout, or the least cost."""
    search = alternatives.search
    equals = [other for other in alternatives.same(function, name) if other != name]
    if equals:
        yield f"it has the layout of all equal values: {summarize_names([name, *equals])}"
    for mark in alternatives.annotations(function, name):
        free = alternatives.without(mark)
        gain = results[0].outcome.seconds - free.seconds if results[0].outcome else 0.0
        cost = (
            f"without it a step would take {seconds(gain)} less" if gain > 0 else "without it no step would be faster"
        )
        yield f"annotated {print_placements(mark.placements)} at {mark.location or 'an unknown place'}: {cost}"
    if count == 1:
        yield "it has no other valid layout"
    else:
        yield (
            f"minimum time of a step for {count} layouts on {search.profile.name} with {size(search.memory_limit)} per "
            "device, all other layouts being optimal for it:"
        )


def _by_similarity(layouts: Sequence[Placed], chosen: Placed) -> list[Placed]:
    """Sort layouts: the chosen one, then those that differ from it along one axis, then along two."""
    return sorted(layouts, key=lambda layout: sum(a != b for a, b in zip(layout, chosen, strict=True)))


def _row(layout: str, outcome: Outcome, chosen: Outcome) -> tuple[str, ...]:
    if outcome is chosen:
        collectives = _collectives(outcome.collectives)
        figures = (
            seconds(outcome.op_seconds), seconds(outcome.reshard_seconds), size(outcome.memory), size(outcome.sent),
        )  # fmt: skip
        return f"{layout} (chosen)", seconds(outcome.seconds), *figures, collectives or "none"
    more = outcome.seconds - chosen.seconds
    share = f" ({more / chosen.seconds:+.2%})" if change(outcome.seconds, chosen.seconds, seconds) != "0" else ""
    return (
        layout,
        f"{change(outcome.seconds, chosen.seconds, seconds)}{share}",
        change(outcome.op_seconds, chosen.op_seconds, seconds),
        change(outcome.reshard_seconds, chosen.reshard_seconds, seconds),
        change(outcome.memory, chosen.memory, size),
        change(outcome.sent, chosen.sent, size),
        _change(outcome.collectives, chosen.collectives),
    )


def _collectives(counts: Mapping[tuple[str, str], int]) -> str:
    return ", ".join(f"{times} {name} along {axis}" for (name, axis), times in sorted(counts.items()))


def _change(new: Mapping[tuple[str, str], int], old: Mapping[tuple[str, str], int]) -> str:
    """Format the differences of the numbers of collectives."""
    more = {key: new.get(key, 0) - old.get(key, 0) for key in sorted({**old, **new})}
    return ", ".join(f"{times:+} {name} along {axis}" for (name, axis), times in more.items() if times) or "the same"
