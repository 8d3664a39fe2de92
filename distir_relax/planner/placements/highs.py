"""The integer program solved by HiGHS: the best placements, how far from the best they may be, what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distir_relax.errors import DistIRError
from distir_relax.planner.placements.graph import Graph
from distir_relax.planner.placements.integer_program import IntegerProgram, seconds_of
from distir_relax.planner.placements.memory import MemoryRows, Row
from distir_relax.planner.placements.prices import Prices
from distir_relax.units import size


@dataclass(frozen=True, slots=True)
class Solution:
    """The number of the way that each node takes, the `seconds` of a step, and a `bound`: no solution takes less.

    `bytes` is the most memory that a device needs.
    """

    chosen: tuple[int, ...]
    seconds: float
    bound: float
    bytes: float

    @property
    def gap(self) -> float:
        """How much of its time a better solution could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


def solve(graph: Graph, prices: Prices, memory: float = math.inf, limit: float = 60.0, gap: float = 1e-4) -> Solution:
    """The best ways with which no device needs more than `memory` bytes, found by HiGHS.

    It ends after `limit` seconds, or with a solution that is within `gap` of the bound. Raises `DistIRError` where
    there is none: it says how little memory would do, and what needs it.
    """
    program = IntegerProgram(graph, prices)
    rows = MemoryRows(graph, program).rows()
    found = _highs(program, rows, program.costs, memory, limit, gap)
    if found.x is None and math.isfinite(memory):
        raise _no_room(program, rows, memory, limit)
    if found.x is None:
        raise DistIRError("no placements were found", hint=f"the solver says: {found.message}")
    chosen = tuple(int(np.argmax(found.x[list(block)])) for block in program.ways)
    bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
    needs = max((_bytes(row, found.x) for row in rows), default=0.0)
    return Solution(chosen, seconds_of(graph, prices, chosen), max(0.0, float(bound)) / program.scale, needs)


def _highs(
    program: IntegerProgram, rows: Sequence[Row], costs: Sequence[float], memory: float, limit: float, gap: float
) -> Any:
    """What HiGHS finds. Where `costs` have one variable more than the program has, that is what multiplies `memory`."""
    # It takes a while to import, and few need it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    values, numbers, columns = list(program.values), list(program.rows), list(program.columns)
    lower, upper = list(program.lower), list(program.upper)
    extra = len(costs) - len(program.costs)
    for row in rows if math.isfinite(memory) else ():
        values += [size / memory for size in row.terms.values()] + [-1.0] * extra
        numbers += [len(lower)] * (len(row.terms) + extra)
        columns += [*row.terms, *[len(program.costs)] * extra]
        lower.append(-np.inf)
        upper.append(0.0 if extra else 1.0)
    matrix = coo_array((values, (numbers, columns)), shape=(len(lower), len(costs))).tocsr()
    most = np.ones(len(costs))
    most[len(program.costs) :] = np.inf
    return milp(
        np.array(costs),
        integrality=np.array([*program.whole, *[0] * extra]),
        bounds=Bounds(0, most),
        constraints=LinearConstraint(matrix, np.array(lower), np.array(upper)),
        options={"time_limit": limit, "mip_rel_gap": gap},
    )


def _no_room(program: IntegerProgram, rows: Sequence[Row], memory: float, limit: float) -> DistIRError:
    """The error that says how little memory would do, and where it is needed."""
    least = _highs(program, rows, [*[0.0] * len(program.costs), 1.0], memory, limit, 1e-3)
    if least.x is None:
        return DistIRError("no placements were found", hint=f"the solver says: {least.message}")
    tightest = max(rows, key=lambda row: _bytes(row, least.x))
    needs, op = _bytes(tightest, least.x), tightest.op
    return DistIRError(
        f"no placements need {size(memory)} on each device or less: the least there is needs {size(needs)}, "
        f"while {op.name} makes %{op.results[0].name} of @{tightest.function}",
        op.location,
        f"give memory={math.ceil(needs)} or more, or a mesh of more devices",
    )


def _bytes(row: Row, x: Any) -> float:
    return float(sum(size * x[variable] for variable, size in row.terms.items()))
