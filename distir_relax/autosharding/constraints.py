"""An integer program with rows for the memory that is needed at some ops, and what HiGHS finds of it through scipy.

Memory is a constraint only where it has to be: ops at which a solution needs more than any around them, and more than
there is, get rows until there are none.
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
from distir_relax.autosharding.memory import Memory, Need, Path
from distir_relax.autosharding.silence_stdout import unheard

Array = npt.NDArray[Any]

_BEST, _INFEASIBLE = 0, 2
_ROWS_AT_ONCE = 20
"""How many ops that need too much memory are added at a time, the largest first."""
_LEAST_TIME = 1.0
_NEAR = (0.02, 0.08, 0.32, math.inf)
"""How much more than the relaxation a first solution may cost: the less, the fewer variables there are."""
_ROUGHLY = 5e-3
"""How near to the best of what is looked at it has to be."""
_WHOLE = 1e-6


@dataclass(frozen=True, slots=True)
class Found:
    """What HiGHS found: the variables, None where there is no solution, their `value`, a `bound` of all, what is needed
    at each op, and of a relaxation the reduced cost of each variable, and the ops whose memory makes it dearer.
    """

    x: Array | None
    value: float
    bound: float
    status: int
    message: str
    needs: tuple[Need, ...] = ()
    reduced: Array = field(default_factory=lambda: np.zeros(0))
    tight: tuple[Path, ...] = ()

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing meets the constraints."""
        return self.status == _INFEASIBLE

    @property
    def is_out_of_time(self) -> bool:
        """Whether there may be something better, or anything."""
        return self.status not in (_BEST, _INFEASIBLE)

    @property
    def most(self) -> float:
        """The bytes that a device needs."""
        return max((need.bytes for need in self.needs), default=0.0)


@dataclass(slots=True)
class Rows:
    """The constraints of a program, with those of `memory` bytes at the ops of `paths`.

    What is looked for is the least of `costs`, by variable, and of the most that is needed, in units of `memory`, at
    `price` each; only where that is nothing, `memory` is a limit. Behind the variables of the program come what stays
    all the time and the most that is needed.
    """

    program: IntegerProgram
    needs: Memory
    memory: float
    costs: Array
    ends: float
    """When to have found something, on the clock of `time.monotonic`."""
    price: float = 0.0
    within: float = math.inf
    """What a solution may cost by the costs of the program."""
    paths: dict[Path, None] = field(default_factory=dict)
    _constraints: tuple[Any, Array, Array] | None = field(default=None, init=False)
    """Written once for the rows that there are; a copy with `replace` writes its own."""

    def bounded(self, gap: float | None = None, allowed: Array | None = None) -> Found:
        """As `relaxed`, or with a `gap` as `whole`, with the rows that there are: a bound."""
        return self._relaxed() if gap is None else self._whole(gap, allowed)

    def relaxed(self) -> Found:
        """The best values of the variables where they need not be whole, with rows for all memory that they need."""
        return self._fitting(self._relaxed)

    def whole(self, gap: float, allowed: Array | None = None) -> Found:
        """The best whole solution, or one within `gap`, in which no variables but those `allowed` are used."""
        return self._fitting(lambda: self._whole(gap, allowed))

    def near(self, relaxed: Found, known: float = math.inf) -> Found:
        """A whole solution that costs less than `known`, and little more than the relaxation where there is one."""
        if relaxed.x is None or self.is_whole(relaxed):
            return relaxed
        found = replace(relaxed, x=None)
        for near in _NEAR:
            aim = near * max(1.0, relaxed.value)
            spare = min(aim, known - relaxed.value)
            found = self.whole(_ROUGHLY, relaxed.reduced <= spare)
            if found.x is not None or spare < aim:
                break
        return found

    def is_whole(self, found: Found) -> bool:
        """Whether a solution of the relaxation is one of the integer program."""
        if found.x is None:
            return False
        ways = found.x[np.flatnonzero(self.program.whole)]
        return bool(np.all(np.minimum(ways, 1 - ways) < _WHOLE))

    def _fitting(self, solve: Callable[[], Found]) -> Found:
        while True:
            found = solve()
            if found.x is None or not self._add(found):
                return found

    def _add(self, found: Found) -> bool:
        """Add the ops at which a solution needs most; whether there were any."""
        assert found.x is not None
        limit = self.memory * (found.x[-1] if self.price else 1.0)
        sizes = [0.0, *(need.bytes for need in found.needs), 0.0]
        over = [
            need
            for before, need, after in zip(sizes, found.needs, sizes[2:], strict=False)
            if need.bytes > limit * (1 + 1e-6) and need.path not in self.paths and before <= need.bytes >= after
        ]
        over.sort(key=lambda need: -need.bytes)
        if over:
            self.paths.update((need.path, None) for need in over[:_ROWS_AT_ONCE])
            self._constraints = None
        return bool(over)

    def _written(self) -> tuple[Any, Array, Array]:
        """The matrix of all rows, and their lower and upper bounds."""
        from scipy.sparse import coo_array

        if self._constraints is not None:
            return self._constraints
        program, stays = self.program, len(self.program.costs)
        terms = [(program.rows, program.columns, program.values)]
        lower, upper = program.lower, program.upper
        if self.within < math.inf:
            terms.append((np.full(stays, len(lower)), np.arange(stays), program.costs))
            lower, upper = np.append(lower, -np.inf), np.append(upper, self.within)
        if self.paths:
            first, ends = len(lower), np.full(len(self.paths), stays)
            for number, (columns, held) in enumerate([self.needs.staying(), *map(self.needs.row, self.paths)]):
                terms.append((np.full(len(columns), first + number), columns, held / self.memory))
            numbers = first + 1 + np.arange(len(ends))
            terms.append((numbers, ends, np.ones(len(ends))))
            terms.append((numbers, ends + 1, -np.ones(len(ends))))
            terms.append((np.array([first]), np.array([stays]), np.array([-1.0])))
            lower = np.array([*lower, 0.0, *[-np.inf] * len(ends)])
            upper = np.array([*upper, 0.0, *[0.0] * len(ends)])
        numbers, columns, values = (np.concatenate(parts) for parts in zip(*terms, strict=True))
        matrix = coo_array((values, (numbers, columns)), shape=(len(lower), stays + 2)).tocsr()
        self._constraints = matrix, lower, upper
        return self._constraints

    def _costs(self) -> Array:
        return np.concatenate([self.costs, [0.0, self.price]])

    def _left(self) -> float:
        return max(_LEAST_TIME, self.ends - time.monotonic())

    def _upper(self) -> Array:
        return np.concatenate([np.ones(len(self.costs)), [np.inf, np.inf if self.price else 1.0]])

    def _relaxed(self) -> Found:
        # It takes a while to import, and few need it.
        from scipy.optimize import linprog
        from scipy.sparse import vstack

        matrix, lower, upper = self._written()
        equal = lower == upper
        above, below = np.isfinite(lower) & ~equal, np.isfinite(upper) & ~equal
        more = vstack([matrix[below], -matrix[above]]) if np.any(above | below) else None
        highest = self._upper()
        # That no variable of the program is more than 1 follows from its rows.
        highest[:-2] = np.inf
        with unheard():
            found = linprog(
                self._costs(),
                more,
                np.concatenate([upper[below], -lower[above]]) if more is not None else None,
                matrix[equal],
                lower[equal],
                np.stack([np.zeros(len(highest)), highest], axis=1),
                method="highs-ds",
                options={"time_limit": self._left()},
            )
        if found.status != 0:
            return _nothing(found)
        needs = tuple(self.needs.needs(found.x))
        tight = tuple(path for path, dual in zip(self.paths, found.ineqlin.marginals, strict=False) if dual)
        return Found(found.x, found.fun, found.fun, 0, found.message, needs, found.lower.marginals, tight)

    def _whole(self, gap: float, allowed: Array | None) -> Found:
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix, lower, upper = self._written()
        # What is not used is not there: most of the time would go into telling the solver of it.
        ways = allowed[:-2] if allowed is not None else np.ones(len(self.costs), dtype=bool)
        used = np.flatnonzero(np.append(ways, (True, True)))
        with unheard():
            found = milp(
                self._costs()[used],
                integrality=np.concatenate([self.program.whole, [0, 0]])[used],
                bounds=Bounds(0, self._upper()[used]),
                constraints=LinearConstraint(matrix[:, used], lower, upper),
                options={"time_limit": self._left(), "mip_rel_gap": gap},
            )
        if found.x is None:
            return _nothing(found)
        x = np.zeros(matrix.shape[1])
        x[used] = found.x
        bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
        return Found(x, found.fun, bound, found.status, found.message, tuple(self.needs.needs(x)))


def _nothing(found: Any) -> Found:
    return Found(None, np.inf, np.inf if found.status == _INFEASIBLE else -np.inf, found.status, found.message)
