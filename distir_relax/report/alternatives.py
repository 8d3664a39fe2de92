"""What other layouts of a value would have cost, where placements were looked for: of the whole program, as a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distir_relax.autosharding.alternatives import Alternative, Alternatives, Outcome
from distir_relax.ir import DTensorType
from distir_relax.report.layout_text import named, short
from distir_relax.report.text_table import aligned
from distir_relax.sharding.factor_selection import Placed
from distir_relax.support.units import change, seconds, size

_HEAD = ("", "a step", "ops", "sending", "memory", "sent", "collectives")


def alternatives_text(asked: Alternatives, function: str, name: str, kind: DTensorType, limit: float) -> list[str]:
    """What each layout of a value would have cost, and what the user's marks on it cost; `kind` is how it lies.

    Those most like it come first; none is begun after `limit` seconds.
    """
    mesh = asked.search.mesh
    ends = time.monotonic() + limit
    layouts = _by_likeness(asked.layouts(function, name), kind.placements)
    found: list[Alternative] = []
    for layout in layouts:
        if found and time.monotonic() > ends:
            break
        found.append(asked.best(function, name, layout))
    chosen = found[0].outcome
    lines = [*_why(asked, function, name, found, len(layouts))]
    if chosen is None:
        return [*lines, f"as it lies: {found[0].refused}"]
    rows = [_row(short(replace(kind, placements=a.layout), mesh), a.outcome, chosen) for a in found if a.outcome]
    # The layout as it is comes first, the others by what they cost.
    times = [a.outcome.seconds for a in found if a.outcome]
    order = [0, *sorted(range(1, len(rows)), key=times.__getitem__)]
    lines += aligned([_HEAD, *(rows[i] for i in order)], left=(0, len(_HEAD) - 1))
    lines += [f"{short(replace(kind, placements=a.layout), mesh)}: {a.refused}" for a in found if a.outcome is None]
    if rest := len(layouts) - len(found):
        lines.append(f"{rest} more layouts were not looked at in {limit:g} s: --limit gives it longer")
    return lines


def _why(asked: Alternatives, function: str, name: str, found: Sequence[Alternative], count: int) -> Iterator[str]:
    """Why a value lies as it does: by a mark, for lack of others, or because it is cheapest so."""
    search = asked.search
    alike = [other for other in asked.same(function, name) if other != name]
    if alike:
        yield f"it lies as what is alike does: {named([name, *alike])}"
    for mark in asked.annotations(function, name):
        free = asked.without(mark)
        gain = found[0].outcome.seconds - free.seconds if found[0].outcome else 0.0
        cost = (
            f"without it a step would take {seconds(gain)} less" if gain > 0 else "without it nothing would be faster"
        )
        yield f"marked {mark.attrs['placements']} at {mark.location or 'an unknown place'}: {cost}"
    if count == 1:
        yield "there is no other layout for it"
    else:
        yield (
            f"of {count} layouts, what a step takes at least on {search.profile.name} with {size(search.memory_limit)} "
            "a device, all else laid out as suits it best:"
        )


def _by_likeness(layouts: Sequence[Placed], chosen: Placed) -> list[Placed]:
    """The chosen layout, then those that differ from it along one axis, then along two."""
    return sorted(layouts, key=lambda layout: sum(a != b for a, b in zip(layout, chosen, strict=True)))


def _row(layout: str, found: Outcome, chosen: Outcome) -> tuple[str, ...]:
    if found is chosen:
        moved = _collectives(found.collectives)
        figures = (seconds(found.op_seconds), seconds(found.reshard_seconds), size(found.memory), size(found.sent))
        return f"{layout} (as it lies)", seconds(found.seconds), *figures, moved or "none"
    more = found.seconds - chosen.seconds
    share = f" ({more / chosen.seconds:+.2%})" if change(found.seconds, chosen.seconds, seconds) != "0" else ""
    return (
        layout,
        f"{change(found.seconds, chosen.seconds, seconds)}{share}",
        change(found.op_seconds, chosen.op_seconds, seconds),
        change(found.reshard_seconds, chosen.reshard_seconds, seconds),
        change(found.memory, chosen.memory, size),
        change(found.sent, chosen.sent, size),
        _change(found.collectives, chosen.collectives),
    )


def _collectives(counts: Mapping[tuple[str, str], int]) -> str:
    return ", ".join(f"{times} {name} along {axis}" for (name, axis), times in sorted(counts.items()))


def _change(new: Mapping[tuple[str, str], int], old: Mapping[tuple[str, str], int]) -> str:
    """What collectives there are more, and less."""
    more = {key: new.get(key, 0) - old.get(key, 0) for key in sorted({**old, **new})}
    return ", ".join(f"{times:+} {name} along {axis}" for (name, axis), times in more.items() if times) or "the same"
