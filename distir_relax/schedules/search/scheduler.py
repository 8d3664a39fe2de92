"""Scheduler: the best of the registered schedules, priority policies, and local search from those."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from distir_relax.schedules.activation_memory import Memory
from distir_relax.schedules.registry import orders_by_shape, scheduler
from distir_relax.schedules.search.bound import lower_bound
from distir_relax.schedules.search.evaluate import Run, run
from distir_relax.schedules.search.greedy import list_schedule
from distir_relax.schedules.search.improve import improve
from distir_relax.schedules.search.merge_backwards import merge_backwards
from distir_relax.schedules.search.policies import policies
from distir_relax.schedules.search.problem import Problem
from distir_relax.schedules.task import Order, Shape
from distir_relax.schedules.task_times import EQUAL, Number, Times

_STARTS = 3
"""Number of orders that local search starts from."""
_STEPS = 240_000
"""Budget of local search, in evaluated tasks over all starts: a quarter of a second."""


@dataclass(frozen=True, slots=True)
class OptimizedOrder:
    """An order with its makespan, and a lower `bound` for that shape, these times and this memory."""

    order: Order
    makespan: Number
    bound: Number

    @property
    def gap(self) -> float:
        """Return the relative gap of the makespan to the bound: 0 for an order that is proven optimal."""
        return max(0.0, float(self.makespan / self.bound) - 1) if self.bound else 0.0

    def __str__(self) -> str:
        if self.makespan <= self.bound:
            return f"makespan {_format(self.makespan)}: no order takes less"
        return f"makespan {_format(self.makespan)}, {self.gap:.1%} above the lower bound {_format(self.bound)}"


def best_order(shape: Shape, times: Times = EQUAL, memory: Memory | None = None) -> OptimizedOrder:
    """Return the best order found for these times within this memory, with stages in a loop or in a V, and its bound.

    It is at least as good as any registered schedule with these chunks and stage placement that fits: the search begins
    with those and with orders by `policies`, and improves the best by local search. Backwards are split if that is
    faster. The result is deterministic. Raises `DistIRError` if no order fits in memory, which needs room for one
    microbatch.
    """
    times.check_shape(shape.stages, shape.microbatches)
    if memory:
        memory.check_shape(shape.ranks, shape.stages)
    split, unsplit = _problems(shape, times, memory, split=True), _problems(shape, times, memory, split=False)
    bound = min(lower_bound(problem) * problem.unit for problem in split)
    registered = list(orders_by_shape(shape))
    # Try only two policies with whole backwards: split ones can do the same.
    best_unsplit = _best(unsplit, registered, bound, count=2)[0]
    if best_unsplit.makespan > bound:
        starts = _best(split, registered, bound, count=8)
        best = min((_improve(candidate, bound) for candidate in starts), key=lambda candidate: candidate.makespan)
        if best.makespan < best_unsplit.makespan:
            return OptimizedOrder(merge_backwards(best.problem, best.run), best.makespan, bound)
    return OptimizedOrder(best_unsplit.problem.order(best_unsplit.run.rows), best_unsplit.makespan, bound)


@scheduler("auto", chunks=None)
def auto(shape: Shape, times: Times, memory: Memory | None) -> Order:
    """Return the order of `best_order`."""
    return best_order(shape, times, memory).order


@dataclass(frozen=True, slots=True)
class _Candidate:
    problem: Problem
    run: Run

    @property
    def makespan(self) -> Number:
        return self.run.makespan * self.problem.unit


def _problems(shape: Shape, times: Times, memory: Memory | None, split: bool) -> list[Problem]:
    """Return a problem for each stage placement that fits in memory."""
    problems = [Problem(shape, rank_of, times, memory, split) for rank_of in sorted({shape.loop(), shape.vee()})]
    errors = [problem.infeasibility() for problem in problems]
    if all(errors):
        raise next(filter(None, errors))
    return [problem for problem, error in zip(problems, errors, strict=True) if not error]


def _best(problems: list[Problem], registered: list[Order], bound: Number, count: int) -> list[_Candidate]:
    """Return the shortest of the registered orders and those by policies, the best first; stop at the bound."""
    by_makespan: dict[Number, _Candidate] = {}
    for candidate in chain(*(_registered(problem, registered) for problem in problems), _by_policies(problems, count)):
        by_makespan.setdefault(candidate.makespan, candidate)
        if candidate.makespan <= bound:
            break
    return [by_makespan[makespan] for makespan in sorted(by_makespan)][:_STARTS]


def _improve(candidate: _Candidate, bound: Number) -> _Candidate:
    problem = candidate.problem
    effort = _STEPS // (_STARTS * problem.count)
    return _Candidate(problem, improve(problem, candidate.run, bound / problem.unit, effort))


def _registered(problem: Problem, registered: list[Order]) -> Iterator[_Candidate]:
    """Yield the orders of registered schedules that are complete and fit."""
    for order in registered:
        if order.rank_of == problem.rank_of and (problem.split or not order.splits):
            rows = problem.rows(order)
            complete = sorted(chain(*rows)) == list(range(problem.count))
            if complete and all(problem.fits_in_memory(rank, row) for rank, row in enumerate(rows)):
                result = run(problem, rows)
                if result:
                    yield _Candidate(problem, result)


def _by_policies(problems: list[Problem], count: int) -> Iterator[_Candidate]:
    """Yield orders by up to `count` policies: the first two for all stage placements, the others for the best ones."""
    shortest: list[Number] = [math.inf] * len(problems)
    for number, chosen in enumerate(islice(zip(*map(policies, problems), strict=True), count)):
        for i, (problem, policy) in enumerate(zip(problems, chosen, strict=True)):
            if number < 2 or shortest[i] <= min(shortest):
                result = run(problem, list_schedule(problem, policy))
                if result:  # always: a rank that does what has come to it waits for nothing
                    shortest[i] = min(shortest[i], result.makespan * problem.unit)
                    yield _Candidate(problem, result)


def _format(number: Number) -> str:
    return str(int(number)) if number == int(number) else f"{float(number):.6g}"
