"""The time of each op of a program on a rank, beside the least time that the device could take (its roofline).

The time between the ends of two ops, also that of Python's own work, counts for the second one. Ops that are equal,
such as those of a model's layers, are one row. Williams et al., Roofline: An Insightful Visual Performance Model, 2009.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.calibration.limits import Limits
from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import op_work, repeated_seconds
from distir_relax.ir import Op
from distir_relax.ir.symbols import specialize_op
from distir_relax.ops import Trait, lookup

if TYPE_CHECKING:
    from distir_relax.lowering.emit.torch_function import ClockedOp

Marks: TypeAlias = "Sequence[tuple[int, int]]"
"""The numbers of the ops of a step in the order of their ends, with nanoseconds; the first is the step's begin."""
Sizes: TypeAlias = "Callable[[Op], tuple[Mapping[str, int], int]]"
"""Returns the sizes that an op of a program runs with in a step, by symbol, and how often for each of its ends."""

_TRANSFERS = frozenset({Trait.COMMUNICATES, Trait.ON_COMMUNICATOR})


@dataclass(frozen=True)
class OpTime:
    """Equal ops of a step: name, types of operands, number, and the seconds of all of them in a step.

    `limit` is the least time that they could take, None for communication. `location` is that of the first.
    """

    op: str
    operands: str
    count: int
    seconds: float
    limit: float | None
    location: str


@dataclass(frozen=True)
class StepTimes:
    """The time of a step and of its ops, the longest first. `what` says which step, `seconds` is the median of many."""

    what: str
    seconds: float
    ops: Sequence[OpTime]

    @property
    def limit(self) -> float:
        """The least time of all ops together, without communication."""
        return sum(op.limit or 0.0 for op in self.ops)


@dataclass(frozen=True)
class OpTimes:
    """The limits of a device, and the steps that a rank ran on it."""

    limits: Limits
    steps: Sequence[StepTimes]


def step_times(what: str, ops: Sequence[ClockedOp], steps: Sequence[Marks], sizes: Sizes, limits: Limits) -> StepTimes:
    """Return the median times of `ops` over `steps`, all of the same kind.

    Weights are read from memory in each step if they are larger together than the device's cache.
    """
    times: dict[int, list[float]] = {}
    for marks in steps:
        taken: dict[int, float] = {}
        for (_, before), (number, end) in pairwise(marks):
            taken[number] = taken.get(number, 0.0) + 1e-9 * (end - before)
        for number, seconds in taken.items():
            times.setdefault(number, []).append(seconds)
    counts = Counter(number for number, _ in steps[-1][1:])
    weights = {
        v.name: v.tensor.bytes for n in times for v, f in zip(ops[n].op.operands, ops[n].fixed, strict=True) if f
    }
    profile, are_cold = limits.profile(), sum(weights.values()) > limits.cache
    groups: dict[tuple[str, str], list[int]] = {}
    for number in times:
        op = ops[number].op
        kinds = ", ".join(str(v.tensor) for v in specialize_op(op, sizes(op)[0]).operands)
        groups.setdefault((op.name, kinds), []).append(number)
    rows = []
    for (name, kinds), numbers in groups.items():
        least = [_limit(ops[n], sizes, profile, are_cold) for n in numbers]
        limit = None if None in least else sum(counts[n] * (t or 0.0) for n, t in zip(numbers, least, strict=True))
        seconds = sum(median(times[n]) for n in numbers)
        rows.append(OpTime(name, kinds, sum(counts[n] for n in numbers), seconds, limit, ops[numbers[0]].op.location))
    total = median(1e-9 * (marks[-1][1] - marks[0][1]) for marks in steps)
    return StepTimes(what, total, sorted(rows, key=lambda row: -row.seconds))


def _limit(clocked: ClockedOp, sizes: Sizes, profile: Profile, are_cold: bool) -> float | None:
    """Return the least seconds of an op, whose weights are read from memory if they are cold; None if it sends."""
    entry = lookup(clocked.op.name, clocked.op.location)
    if not entry.traits.isdisjoint(_TRANSFERS):
        return None
    values, times = sizes(clocked.op)
    op = specialize_op(clocked.op, values)
    operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    cold = [are_cold and fixed for fixed in clocked.fixed] + [False] * len(results)
    work = op_work(entry, operands, op.attrs, results, fixed=True, cold=cold)
    if work.product and any(kind.dtype in ("int8", "uint8") for kind in operands):
        work = replace(work, dtype="int8")
    return times * repeated_seconds(profile, work)
