"""Minimum-memory placements, computed when nothing fits.

Minimizing the peak alone leaves everything below it arbitrary, so that solutions create new peaks. Therefore all live
bytes count too, with a small weight; the linear relaxation proves when no lower peak exists.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from distir_relax.autosharding.constraints import MemoryConstrainedProgram, SolverResult

_TOTAL_WEIGHT = 1e-2
"""Weight of all live bytes relative to the peak."""
_GAP = 1e-3
"""Relative gap to the minimum peak."""


def minimize_memory(rows: MemoryConstrainedProgram) -> tuple[SolverResult, bool]:
    """Return a solution whose peak is minimal within `_GAP`, and whether that is proven."""
    item_bytes = rows.model.total() / rows.memory
    largest = float(item_bytes.max(initial=1.0))
    lightest = replace(rows, memory=math.inf, costs=item_bytes / largest, paths={}).solve_relaxation()
    if lightest.x is None or not lightest.peak:
        return lightest, lightest.x is not None and rows.is_integral(lightest)
    costs = item_bytes * _TOTAL_WEIGHT / float(item_bytes @ lightest.x[: len(item_bytes)])
    weighted = replace(rows, costs=costs, peak_cost=rows.memory / lightest.peak)
    best = weighted.solve_near_relaxation(weighted.solve_relaxation())
    peak_only = replace(weighted, costs=np.zeros(len(item_bytes)))
    if best.x is None:
        exact = peak_only.solve_integer(_GAP)
        return exact, not exact.is_out_of_time
    relaxed, peak = peak_only.solve_bound(), best.peak / lightest.peak
    # No better solution uses any other variable.
    allowed = relaxed.reduced_costs <= peak - relaxed.value
    if peak <= relaxed.bound * (1 + _GAP) or peak <= peak_only.solve_bound(_GAP / 2, allowed).bound * (1 + _GAP):
        return best, True
    exact = peak_only.solve_integer(_GAP, allowed)
    return (exact if exact.x is not None and exact.peak < best.peak else best), not exact.is_out_of_time
