"""The integer program solved by HiGHS: the best placements, how far from the best they may be, what does not fit.

First come its linear relaxation and the rows of memory that this needs: a bound of all solutions, and of those in which
some way or move is, by its reduced cost. What costs more than a solution that is known has no part in a better one. So
most variables are out before anything is branched on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from distir_relax.autosharding.constraints import Found, Rows
from distir_relax.autosharding.costs import Prices
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import IntegerProgram, seconds_of
from distir_relax.autosharding.memory import Memory, Path
from distir_relax.autosharding.memory_tiebreak import lighter
from distir_relax.autosharding.min_memory import least_memory
from distir_relax.errors import DistIRError
from distir_relax.support.units import size

_FAR = 0.08
"""From how much more on a known solution counts as none: nearly all could be better."""
_SLACK = 1e-5
"""So much of a time is let pass, as the solver has its tolerances."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The number of the way that each node takes, the `seconds` of a step, and a `bound`: no solution takes less.

    `bytes` is the most memory that a device needs, `tight` the ops at which that is what it takes longer for.
    """

    chosen: tuple[int, ...]
    seconds: float
    bound: float
    bytes: float
    tight: tuple[Path, ...] = ()

    @property
    def gap(self) -> float:
        """How much of its time a better solution could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


class NoWay(DistIRError):
    """There are no placements at all that meet what is asked."""


class NoRoom(DistIRError):
    """There are no placements that need as little memory as there is; with `least` bytes a device there are."""

    least: float = math.inf


class OutOfTime(DistIRError):
    """No placements were found in time; there are none that take less than `bound` seconds."""

    bound: float = 0.0


def solve(
    graph: Graph, prices: Prices, memory: float = math.inf, limit: float = 60.0, gap: float = 1e-4,
    known: Solution | None = None,
) -> Solution:  # fmt: skip
    """The best ways with which no device needs more than `memory` bytes, found by HiGHS.

    It ends after `limit` seconds, or with a solution that is within `gap` of the bound. Where a solution is
    `known`, one of the graph, it is found sooner. Raises `NoRoom` where there is no solution: it says how little
    memory would do, and what needs it; `NoWay` where none would do; `OutOfTime` where none is found in time.
    """
    rows = _rows(graph, prices, memory, limit)
    rows.paths.update(dict.fromkeys(known.tight if known is not None else ()))
    found, bound = _best(rows, gap, known.seconds * rows.program.scale if known is not None else math.inf)
    if found.is_infeasible and rows.paths:
        raise _no_room(rows, limit)
    if found.is_infeasible:
        raise NoWay("no placements were found", hint=f"the solver says: {found.message}")
    if found.x is None:
        error = OutOfTime("no placements were found in time", hint=f"the solver says: {found.message}")
        error.bound = max(0.0, bound) / rows.program.scale
        raise error
    return _solution(rows, found, bound)


def some(
    graph: Graph, prices: Prices, memory: float = math.inf, limit: float = 60.0, known: float = math.inf
) -> Solution | None:  # fmt: skip
    """Ways that take less than `known` seconds, and not much more than the best there are; None where none is found."""
    rows = _rows(graph, prices, memory, limit)
    relaxed = rows.relaxed()
    found = rows.near(relaxed, known * rows.program.scale)
    return replace(_solution(rows, found, relaxed.bound), tight=relaxed.tight) if found.x is not None else None


def _rows(graph: Graph, prices: Prices, memory: float, limit: float) -> Rows:
    ends = time.monotonic() + limit
    program = IntegerProgram(graph, prices)
    return Rows(program, Memory(graph, program), memory, program.costs, ends)


def _best(rows: Rows, gap: float, known: float) -> tuple[Found, float]:
    """The best solution, and what none costs less than; `known` is the cost of one that there is."""
    relaxed = rows.relaxed()
    if relaxed.x is None or rows.is_whole(relaxed):
        return lighter(rows, relaxed, relaxed), relaxed.bound
    if known > (1 + _FAR) * relaxed.value:
        known = min(known, rows.near(relaxed, known).value)
    known *= 1 + _SLACK
    found = rows.whole(gap, relaxed.reduced <= known - relaxed.value)
    if found.is_infeasible and known < math.inf:
        # What is known has to be among what is looked at, but for the solver's tolerances.
        found = rows.whole(gap)
    return lighter(rows, relaxed, found), max(relaxed.value, min(found.bound, known))


def _solution(rows: Rows, found: Found, bound: float) -> Solution:
    assert found.x is not None
    program = rows.program
    chosen = tuple(int(np.argmax(found.x[list(block)])) for block in program.ways)
    seconds = seconds_of(program.graph, program.prices, chosen)
    return Solution(chosen, seconds, max(0.0, bound) / program.scale, found.most)


def _no_room(rows: Rows, limit: float) -> DistIRError:
    """The error that says how little memory would do, and where it is needed."""
    found, is_least = least_memory(replace(rows, ends=time.monotonic() + limit))
    if found.x is None:
        return OutOfTime("no placements were found in time", hint=f"the solver says: {found.message}")
    worst = max(found.needs, key=lambda need: need.bytes)
    op = rows.needs.op(worst.path)
    least = "the least there is" if is_least else "the least that was found"
    error = NoRoom(
        f"no placements need {size(rows.memory)} on each device or less: {least} needs {size(worst.bytes)}, "
        f"while {op.name} makes %{op.results[0].name} of @{worst.path[-1][0]}",
        op.location,
        f"give memory={math.ceil(worst.bytes)} or more, or a mesh of more devices",
    )
    error.least = worst.bytes
    return error
