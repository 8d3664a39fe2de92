"""Of the placements that take as long as the best, those that need least memory."""

from __future__ import annotations

import time
from dataclasses import replace

from distir_relax.autosharding.constraints import Found, Rows

_ALL = 1e-3
"""What all that lives counts, as a part of the peak: what is below a peak would not count otherwise."""
_NEAR = 1e-3
"""How near to the least it has to be."""
_SAME = 1e-9
"""What differs by so little of a time takes as long."""
_SECONDS = 5.0
"""It is worth no more: what was found is as fast."""


def lighter(rows: Rows, relaxed: Found, found: Found) -> Found:
    """A solution that costs what `found` costs, with a lower peak, or `found`; `relaxed` is the relaxation of both.

    Where memory is short it is `found`: that is seldom anything but what all the memory is for, and to look is slow.
    """
    if found.x is None or not found.most:
        return found
    spare = _SAME * max(1.0, found.value)
    if relaxed.tight and found.value > relaxed.value + spare:
        return found
    allowed = relaxed.reduced <= found.value - relaxed.value + spare
    held = rows.needs.all() / found.most
    total = float(held @ found.x[: len(held)])
    highest = max(found.needs, key=lambda need: need.bytes)
    looked_for = replace(
        rows,
        memory=found.most,
        costs=held * (_ALL / total),
        price=1.0,
        within=found.value + spare,
        ends=min(rows.ends, time.monotonic() + _SECONDS),
        paths=dict.fromkeys((*rows.paths, highest.path)),
    )
    other = looked_for.whole(_NEAR, allowed)
    if other.x is None or other.most >= found.most:
        return found
    return replace(found, x=other.x, needs=other.needs)
