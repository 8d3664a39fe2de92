"""Solve the integer program: the best placements, their optimality gap, and the reason if nothing fits.

First the linear relaxation is solved with the memory rows that it violates. Its value bounds all solutions, and its
value plus the reduced cost of a variable bounds the solutions that use it. A variable whose bound exceeds a known
solution cannot be part of a better one (reduced-cost fixing), so most variables are removed before branching.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from distir_relax.autosharding.constraints import MemoryConstrainedProgram, SolverResult
from distir_relax.autosharding.costs import CostTable
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import IntegerProgram, solution_seconds
from distir_relax.autosharding.memory import MemoryModel, Path
from distir_relax.autosharding.memory_tiebreak import reduce_memory
from distir_relax.autosharding.min_memory import minimize_memory
from distir_relax.errors import DistIRError
from distir_relax.support.units import size

_WEAK_GAP = 0.08
"""Relative gap above which a known solution prunes too little, and a better one is searched first."""
_SLACK = 1e-5
"""Relative tolerance of times, for the tolerances of the solver."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The number of each node's strategy, the `seconds` of a step, and a `bound`: no solution takes less.

    `bytes` is the memory peak of a device, `tight` the ops whose memory makes the solution slower.
    """

    chosen: tuple[int, ...]
    seconds: float
    bound: float
    bytes: float
    tight: tuple[Path, ...] = ()

    @property
    def gap(self) -> float:
        """Return the fraction of its time that a better solution could save at most."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds else 0.0


class Infeasible(DistIRError):
    """No placements satisfy the constraints, whatever the memory."""


class InsufficientMemory(DistIRError):
    """No placements fit in memory; with `least` bytes per device some do."""

    minimum: float = math.inf


class SolverTimeout(DistIRError):
    """No placements were found in time; none takes less than `bound` seconds."""

    bound: float = 0.0


def solve(
    graph: Graph, costs: CostTable, memory: float = math.inf, limit: float = 60.0, gap: float = 1e-4,
    incumbent: Solution | None = None,
) -> Solution:  # fmt: skip
    """Return the best strategies with which no device needs more than `memory` bytes.

    It stops after `limit` seconds, or with a solution within `gap` of the bound. A known solution of the graph,
    `incumbent`, speeds it up. Raises `InsufficientMemory` if nothing fits, with the least memory and the op that needs
    it; `Infeasible` if no memory is enough; `SolverTimeout` if no solution is found in time.
    """
    rows = _build(graph, costs, memory, limit)
    rows.paths.update(dict.fromkeys(incumbent.tight if incumbent is not None else ()))
    result, bound = _solve(rows, gap, incumbent.seconds * rows.program.scale if incumbent is not None else math.inf)
    if result.is_infeasible and rows.paths:
        raise _insufficient_memory(rows, limit)
    if result.is_infeasible:
        raise Infeasible("no placements were found", hint=f"the solver says: {result.message}")
    if result.x is None:
        error = SolverTimeout("no placements were found in time", hint=f"the solver says: {result.message}")
        error.bound = max(0.0, bound) / rows.program.scale
        raise error
    return _solution(rows, result, bound)


def solve_approximately(
    graph: Graph, costs: CostTable, memory: float = math.inf, limit: float = 60.0, cutoff: float = math.inf
) -> Solution | None:  # fmt: skip
    """Return strategies of less than `cutoff` seconds, near the relaxation; None if none is found."""
    rows = _build(graph, costs, memory, limit)
    relaxed = rows.solve_relaxation()
    result = rows.solve_near_relaxation(relaxed, cutoff * rows.program.scale)
    return replace(_solution(rows, result, relaxed.bound), tight=relaxed.tight) if result.x is not None else None


def _build(graph: Graph, costs: CostTable, memory: float, limit: float) -> MemoryConstrainedProgram:
    deadline = time.monotonic() + limit
    program = IntegerProgram(graph, costs)
    return MemoryConstrainedProgram(program, MemoryModel(graph, program), memory, program.costs, deadline)


def _solve(rows: MemoryConstrainedProgram, gap: float, cutoff: float) -> tuple[SolverResult, float]:
    """Return the best solution and the lower bound; `cutoff` is the cost of a known one."""
    relaxed = rows.solve_relaxation()
    if relaxed.x is None or rows.is_integral(relaxed):
        return reduce_memory(rows, relaxed, relaxed), relaxed.bound
    if cutoff > (1 + _WEAK_GAP) * relaxed.value:
        cutoff = min(cutoff, rows.solve_near_relaxation(relaxed, cutoff).value)
    cutoff *= 1 + _SLACK
    result = rows.solve_integer(gap, relaxed.reduced_costs <= cutoff - relaxed.value)
    if result.is_infeasible and cutoff < math.inf:
        # The known solution is among the allowed variables, except for the tolerances of the solver.
        result = rows.solve_integer(gap)
    return reduce_memory(rows, relaxed, result), max(relaxed.value, min(result.bound, cutoff))


def _solution(rows: MemoryConstrainedProgram, result: SolverResult, bound: float) -> Solution:
    assert result.x is not None
    program = rows.program
    chosen = tuple(int(np.argmax(result.x[list(variables)])) for variables in program.choices)
    seconds = solution_seconds(program.graph, program.table, chosen)
    return Solution(chosen, seconds, max(0.0, bound) / program.scale, result.peak)


def _insufficient_memory(rows: MemoryConstrainedProgram, limit: float) -> DistIRError:
    """Return the error with the least memory that is enough, and the op that needs it."""
    result, is_proven = minimize_memory(replace(rows, deadline=time.monotonic() + limit))
    if result.x is None:
        return SolverTimeout("no placements were found in time", hint=f"the solver says: {result.message}")
    peak = max(result.usage, key=lambda op: op.bytes)
    op = rows.model.op(peak.path)
    minimum = "the minimum is" if is_proven else "the best found is"
    error = InsufficientMemory(
        f"no placements fit in {size(rows.memory)} per device: {minimum} {size(peak.bytes)}, "
        f"at {op.name} of %{op.results[0].name} in @{peak.path[-1][0]}",
        op.location,
        f"give memory={math.ceil(peak.bytes)} or more, or a mesh of more devices",
    )
    error.minimum = peak.bytes
    return error
