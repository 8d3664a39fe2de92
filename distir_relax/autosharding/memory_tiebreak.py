"""Minimize the memory peak among the optimal placements."""

from __future__ import annotations

import time
from dataclasses import replace

from distir_relax.autosharding.constraints import MemoryConstrainedProgram, SolverResult

_TOTAL_WEIGHT = 1e-3
"""Weight of all live bytes relative to the peak; without it, bytes below the peak would be free."""
_GAP = 1e-3
"""Relative gap of the memory search."""
_TIE = 1e-9
"""Relative difference of times that count as equal."""
_TIME_LIMIT = 5.0
"""Time limit: the result is no faster than the first solution."""


def reduce_memory(rows: MemoryConstrainedProgram, relaxed: SolverResult, best: SolverResult) -> SolverResult:
    """Return a solution of the same cost as `best` with a lower peak, or `best`; `relaxed` is the relaxation of both.

    If memory is scarce it is `best`: its peak is seldom lower than necessary, and the search is slow.
    """
    if best.x is None or not best.peak:
        return best
    slack = _TIE * max(1.0, best.value)
    if relaxed.tight and best.value > relaxed.value + slack:
        return best
    allowed = relaxed.reduced_costs <= best.value - relaxed.value + slack
    item_bytes = rows.model.total() / best.peak
    total = float(item_bytes @ best.x[: len(item_bytes)])
    highest = max(best.usage, key=lambda op: op.bytes)
    search = replace(
        rows,
        memory=best.peak,
        costs=item_bytes * (_TOTAL_WEIGHT / total),
        peak_cost=1.0,
        cost_limit=best.value + slack,
        deadline=min(rows.deadline, time.monotonic() + _TIME_LIMIT),
        paths=dict.fromkeys((*rows.paths, highest.path)),
    )
    candidate = search.solve_integer(_GAP, allowed)
    if candidate.x is None or candidate.peak >= best.peak:
        return best
    return replace(best, x=candidate.x, usage=candidate.usage)
