"""The integer program solved by HiGHS: the best placements, how far from the best they may be, what does not fit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distir_relax.errors import DistIRError
from distir_relax.placements.graph import Graph
from distir_relax.placements.integer_program import IntegerProgram, seconds_of
from distir_relax.placements.memory import Memory, Need, Path
from distir_relax.placements.prices import Prices
from distir_relax.units import size

_INFEASIBLE = 2
_ROWS_AT_ONCE = 20
"""How many ops that need too much memory are added to the program at a time, the largest first."""


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


class NoWay(DistIRError):
    """There are no placements at all that meet what is asked."""


class NoRoom(DistIRError):
    """There are no placements that need as little memory as there is; with `least` bytes a device there are."""

    least: float = math.inf


def solve(graph: Graph, prices: Prices, memory: float = math.inf, limit: float = 60.0, gap: float = 1e-4) -> Solution:
    """The best ways with which no device needs more than `memory` bytes, found by HiGHS.

    It ends after `limit` seconds, or with a solution that is within `gap` of the bound. Memory is a constraint only
    where it has to be: ops at which a solution needs too much are added to the program, until there are none. Raises
    `NoRoom` where there is no solution: it says how little memory would do, and what needs it; `NoWay` where none would
    do; `DistIRError` where none is found in time.
    """
    program = IntegerProgram(graph, prices)
    needs = Memory(graph, program)
    ends = time.monotonic() + limit
    paths: dict[Path, None] = {}
    while True:
        found = _highs(program, needs, paths, memory, max(1.0, ends - time.monotonic()), gap)
        if found.status == _INFEASIBLE and paths:
            raise _no_room(program, needs, paths, memory, limit)
        if found.x is None:
            kind = NoWay if found.status == _INFEASIBLE else DistIRError
            raise kind("no placements were found", hint=f"the solver says: {found.message}")
        needed = needs.needs(found.x)
        if not _add(paths, needed, memory):
            break
    chosen = tuple(int(np.argmax(found.x[list(block)])) for block in program.ways)
    bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
    most = max((need.bytes for need in needed), default=0.0)
    return Solution(chosen, seconds_of(graph, prices, chosen), max(0.0, float(bound)) / program.scale, most)


def _add(paths: dict[Path, None], needs: Sequence[Need], memory: float) -> bool:
    """Add the ops at which most is needed of those that need more than there is; whether there were any."""
    over = [need for need in needs if need.bytes > memory * (1 + 1e-6) and need.path not in paths]
    over.sort(key=lambda need: -need.bytes)
    paths.update((need.path, None) for need in over[:_ROWS_AT_ONCE])
    return bool(over)


def _highs(
    program: IntegerProgram, needs: Memory, paths: Iterable[Path], memory: float, limit: float, gap: float,
    least: bool = False,
) -> Any:  # fmt: skip
    """What HiGHS finds: ways that take least time in `memory` bytes, or with `least` those that need least memory.

    Of all that needs memory the ops of `paths` alone are looked at. Behind the variables of the program come what stays
    all the time, in units of `memory`, and the least limit.
    """
    # It takes a while to import, and few need it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    values, numbers, columns = list(program.values), list(program.rows), list(program.columns)
    lower, upper = list(program.lower), list(program.upper)
    stays = len(program.costs)

    def add(terms: Mapping[int, float], more: Mapping[int, float], low: float, high: float) -> None:
        values.extend([*(size / memory for size in terms.values()), *more.values()])
        columns.extend([*terms, *more])
        numbers.extend([len(lower)] * (len(terms) + len(more)))
        lower.append(low)
        upper.append(high)

    rows = [needs.row(path) for path in paths]
    if rows:
        add(needs.staying(), {stays: -1.0}, 0.0, 0.0)
        for row in rows:
            add(row, {stays: 1.0, stays + 1: -1.0}, -np.inf, 0.0)
    costs = np.zeros(stays + 2)
    costs[:stays] = 0.0 if least else program.costs
    costs[stays + 1] = float(least)
    return milp(
        costs,
        integrality=np.array([*program.whole, 0, 0]),
        bounds=Bounds(0, np.array([*[1.0] * stays, np.inf, np.inf if least else 1.0])),
        constraints=LinearConstraint(
            coo_array((values, (numbers, columns)), shape=(len(lower), stays + 2)).tocsr(),
            np.array(lower),
            np.array(upper),
        ),
        options={"time_limit": limit, "mip_rel_gap": gap},
    )


def _no_room(
    program: IntegerProgram, needs: Memory, paths: dict[Path, None], memory: float, limit: float
) -> DistIRError:
    """The error that says how little memory would do, and where it is needed."""
    ends = time.monotonic() + limit
    while True:
        least = _highs(program, needs, paths, memory, max(1.0, ends - time.monotonic()), 1e-3, least=True)
        if least.x is None:
            return DistIRError("no placements were found", hint=f"the solver says: {least.message}")
        found = needs.needs(least.x)
        if not _add(paths, found, least.x[len(program.costs) + 1] * memory):
            break
    worst = max(found, key=lambda need: need.bytes)
    op = needs.op(worst.path)
    error = NoRoom(
        f"no placements need {size(memory)} on each device or less: the least there is needs {size(worst.bytes)}, "
        f"while {op.name} makes %{op.results[0].name} of @{worst.path[-1][0]}",
        op.location,
        f"give memory={math.ceil(worst.bytes)} or more, or a mesh of more devices",
    )
    error.least = worst.bytes
    return error
