"""Solve the integer program with memory constraints, by HiGHS.

Memory rows are added lazily, as cutting planes: after each solve, the ops whose memory is a local peak above the limit
get a row, until a solution has none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.integer_program import IntegerProgram
from distir_relax.autosharding.memory import MemoryModel, OpMemory, Path

Array = npt.NDArray[Any]

_OPTIMAL, _STOPPED, _INFEASIBLE = 0, 1, 2
_MAX_NEW_ROWS = 20
"""Maximum number of memory rows added per solve, the largest first."""
_MIN_TIME = 1.0
_LIMITS = (0.02, 0.08, 0.32, math.inf)
"""Relative costs above the relaxation that a first solution may have: the less, the fewer variables."""
_FIRST_GAP = 5e-3
"""Relative gap of a first solution."""
_INTEGRALITY = 1e-6


@dataclass(frozen=True, slots=True)
class SolverResult:
    """A HiGHS result: the variables, None without solution, their `value`, and a lower `bound` of all solutions.

    `usage` is the memory at each op. A relaxation also has the reduced cost of each variable, and the `tight` ops,
    whose memory rows have a dual price.
    """

    x: Array | None
    value: float
    bound: float
    status: int
    message: str
    usage: tuple[OpMemory, ...] = ()
    reduced_costs: Array = field(default_factory=lambda: np.zeros(0))
    tight: tuple[Path, ...] = ()

    @property
    def is_infeasible(self) -> bool:
        """Return whether nothing satisfies the constraints."""
        return self.status == _INFEASIBLE

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the solver stopped before it proved optimality or infeasibility."""
        return self.status not in (_OPTIMAL, _INFEASIBLE)

    @property
    def peak(self) -> float:
        """Return the memory peak of a device in bytes."""
        return max((op.bytes for op in self.usage), default=0.0)


@dataclass(slots=True)
class MemoryConstrainedProgram:
    """The rows of an integer program, with memory rows for the ops of `paths`.

    It minimizes `costs` by variable, plus `peak_cost` times the peak in units of `memory`; only if that is 0 is
    `memory` a limit. Two variables follow those of the program: the persistent memory, and the peak.
    """

    program: IntegerProgram
    model: MemoryModel
    memory: float
    costs: Array
    deadline: float
    """When to stop, on the clock of `time.monotonic`."""
    peak_cost: float = 0.0
    cost_limit: float = math.inf
    """Upper limit of the program's own cost."""
    paths: dict[Path, None] = field(default_factory=dict)
    _matrix_cache: tuple[Any, Array, Array] | None = field(default=None, init=False)
    """Cache of `_matrix` for the current rows; a copy by `replace` starts empty."""

    def solve_bound(self, gap: float | None = None, allowed: Array | None = None) -> SolverResult:
        """Solve the relaxation, or with a `gap` the integer program, with the present memory rows: a lower bound."""
        return self._solve_relaxation() if gap is None else self._solve_integer(gap, allowed)

    def solve_relaxation(self) -> SolverResult:
        """Solve the linear relaxation, adding memory rows until none is violated."""
        return self._add_rows_until_feasible(self._solve_relaxation)

    def solve_integer(self, gap: float, allowed: Array | None = None) -> SolverResult:
        """Return the best integer solution, or one within `gap`, that uses only `allowed` variables."""
        return self._add_rows_until_feasible(lambda: self._solve_integer(gap, allowed))

    def solve_near_relaxation(self, relaxed: SolverResult, cutoff: float = math.inf) -> SolverResult:
        """Return an integer solution of less than `cutoff`, among variables whose reduced costs are small.

        The limit on reduced costs grows from the first to the last of `_LIMITS` until there is a solution.
        """
        if relaxed.x is None or self.is_integral(relaxed):
            return relaxed
        result = replace(relaxed, x=None)
        for limit in _LIMITS:
            slack = limit * max(1.0, relaxed.value)
            allowed = min(slack, cutoff - relaxed.value)
            result = self.solve_integer(_FIRST_GAP, relaxed.reduced_costs <= allowed)
            if result.x is not None or allowed < slack:
                break
        return result

    def is_integral(self, result: SolverResult) -> bool:
        """Return whether a solution of the relaxation is integral."""
        if result.x is None:
            return False
        choices = result.x[np.flatnonzero(self.program.integrality)]
        return bool(np.all(np.minimum(choices, 1 - choices) < _INTEGRALITY))

    def _add_rows_until_feasible(self, solve: Callable[[], SolverResult]) -> SolverResult:
        while True:
            result = solve()
            if result.x is None or not self._add_rows(result):
                return result

    def _add_rows(self, result: SolverResult) -> bool:
        """Add rows for the local peaks of a solution above the limit; return whether there were any."""
        assert result.x is not None
        limit = self.memory * (result.x[-1] if self.peak_cost else 1.0)
        sizes = [0.0, *(op.bytes for op in result.usage), 0.0]
        violated = [
            op
            for before, op, after in zip(sizes, result.usage, sizes[2:], strict=False)
            if op.bytes > limit * (1 + 1e-6) and op.path not in self.paths and before <= op.bytes >= after
        ]
        violated.sort(key=lambda op: -op.bytes)
        if violated:
            self.paths.update((op.path, None) for op in violated[:_MAX_NEW_ROWS])
            self._matrix_cache = None
        return bool(violated)

    def _matrix(self) -> tuple[Any, Array, Array]:
        """Return the matrix of all rows, and their lower and upper bounds."""
        from scipy.sparse import coo_array

        if self._matrix_cache is not None:
            return self._matrix_cache
        program, count = self.program, len(self.program.costs)
        terms = [(program.rows, program.columns, program.values)]
        lower, upper = program.lower, program.upper
        if self.cost_limit < math.inf:
            terms.append((np.full(count, len(lower)), np.arange(count), program.costs))
            lower, upper = np.append(lower, -np.inf), np.append(upper, self.cost_limit)
        if self.paths:
            first, persistent = len(lower), np.full(len(self.paths), count)
            for row, (columns, sizes) in enumerate(
                [self.model.persistent_terms(), *map(self.model.op_terms, self.paths)]
            ):
                terms.append((np.full(len(columns), first + row), columns, sizes / self.memory))
            numbers = first + 1 + np.arange(len(persistent))
            terms.append((numbers, persistent, np.ones(len(persistent))))
            terms.append((numbers, persistent + 1, -np.ones(len(persistent))))
            terms.append((np.array([first]), np.array([count]), np.array([-1.0])))
            lower = np.array([*lower, 0.0, *[-np.inf] * len(persistent)])
            upper = np.array([*upper, 0.0, *[0.0] * len(persistent)])
        numbers, columns, values = (np.concatenate(parts) for parts in zip(*terms, strict=True))
        matrix = coo_array((values, (numbers, columns)), shape=(len(lower), count + 2)).tocsr()
        self._matrix_cache = matrix, lower, upper
        return self._matrix_cache

    def _all_costs(self) -> Array:
        return np.concatenate([self.costs, [0.0, self.peak_cost]])

    def _seconds_left(self) -> float:
        return max(_MIN_TIME, self.deadline - time.monotonic())

    def _upper_bounds(self) -> Array:
        return np.concatenate([np.ones(len(self.costs)), [np.inf, np.inf if self.peak_cost else 1.0]])

    def _solve_relaxation(self) -> SolverResult:
        matrix, lower, upper = self._matrix()
        highest = self._upper_bounds()
        # The rows of the program imply that its variables are at most 1.
        highest[:-2] = np.inf
        solver = _load(self._all_costs(), matrix, lower, upper, highest)
        status, message = _run(solver, self._seconds_left(), solver="simplex")
        if status != _OPTIMAL:
            return _no_solution(status, message)
        solution, value = solver.getSolution(), solver.getInfo().objective_function_value
        x = np.array(solution.col_value)
        duals = solution.row_dual[len(lower) - len(self.paths) :]
        tight = tuple(path for path, dual in zip(self.paths, duals, strict=True) if dual)
        reduced_costs = np.maximum(np.array(solution.col_dual), 0.0)
        return SolverResult(x, value, value, _OPTIMAL, message, tuple(self.model.by_op(x)), reduced_costs, tight)

    def _solve_integer(self, gap: float, allowed: Array | None) -> SolverResult:
        matrix, lower, upper = self._matrix()
        # Remove unused variables: otherwise most of the time goes into passing them to the solver.
        is_allowed = allowed[:-2] if allowed is not None else np.ones(len(self.costs), dtype=bool)
        used = np.flatnonzero(np.append(is_allowed, (True, True)))
        integrality = np.concatenate([self.program.integrality, [0, 0]])[used]
        solver = _load(self._all_costs()[used], matrix[:, used], lower, upper, self._upper_bounds()[used], integrality)
        status, message = _run(solver, self._seconds_left(), mip_rel_gap=gap)
        info = solver.getInfo()
        if status == _INFEASIBLE or not math.isfinite(info.objective_function_value):
            return _no_solution(status, message)
        x = np.zeros(matrix.shape[1])
        x[used] = solver.getSolution().col_value
        usage = tuple(self.model.by_op(x))
        return SolverResult(x, info.objective_function_value, info.mip_dual_bound, status, message, usage)


def _load(
    costs: Array, matrix: Any, lower: Array, upper: Array, highest: Array, integrality: Array | None = None
) -> Any:
    """Load a program with variables from 0 to `highest` into a solver."""
    # Imported late: it is slow, and few callers need it.
    import highspy

    columns = matrix.tocsc()
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(costs), len(lower)
    program.col_cost_, program.col_lower_, program.col_upper_ = costs, np.zeros(len(costs)), highest
    program.row_lower_, program.row_upper_ = lower, upper
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = columns.indptr, columns.indices
    program.a_matrix_.value_ = columns.data
    if integrality is not None:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        program.integrality_ = [kinds[int(i)] for i in integrality]
    # The public class `Highs` prints a banner to standard output when it is made.
    solver = highspy._Highs()  # type: ignore[attr-defined]
    solver.setOptionValue("output_flag", False)
    solver.passModel(program)
    return solver


def _run(highs: Any, seconds: float, **options: Any) -> tuple[int, str]:
    """Solve within a time limit; return the status and its name."""
    import highspy

    highs.setOptionValue("time_limit", seconds)
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.run()
    status = highs.getModelStatus()
    known = {
        highspy.HighsModelStatus.kOptimal: _OPTIMAL,
        highspy.HighsModelStatus.kInfeasible: _INFEASIBLE,
        highspy.HighsModelStatus.kUnboundedOrInfeasible: _INFEASIBLE,
    }
    return known.get(status, _STOPPED), highs.modelStatusToString(status)


def _no_solution(status: int, message: str) -> SolverResult:
    return SolverResult(None, np.inf, np.inf if status == _INFEASIBLE else -np.inf, status, message)
