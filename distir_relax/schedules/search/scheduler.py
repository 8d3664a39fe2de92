"""The scheduler: the best of what is known, of what policies give, and of what comes of it by small changes."""

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
from distir_relax.schedules.search.improve import improved
from distir_relax.schedules.search.merge_backwards import with_whole_backwards
from distir_relax.schedules.search.policies import policies
from distir_relax.schedules.search.problem import Problem
from distir_relax.schedules.task import Order, Shape
from distir_relax.schedules.task_times import EQUAL, Number, Times

_STARTS = 3
"""How many orders are made better."""
_STEPS = 240_000
"""How many tasks are gone through for that, all in all: a quarter of a second."""


@dataclass(frozen=True, slots=True)
class Found:
    """An order with its makespan, and `bound`, which no order of that shape, with these times and memory, is below."""

    order: Order
    makespan: Number
    bound: Number

    @property
    def gap(self) -> float:
        """By what part of the bound the makespan is above it: 0 for an order that is proven to be the best."""
        return max(0.0, float(self.makespan / self.bound) - 1) if self.bound else 0.0

    def __str__(self) -> str:
        if self.makespan <= self.bound:
            return f"makespan {_shown(self.makespan)}: no order takes less"
        return f"makespan {_shown(self.makespan)}, {self.gap:.1%} above {_shown(self.bound)}, which no order is below"


def best_order(shape: Shape, times: Times = EQUAL, memory: Memory | None = None) -> Found:
    """The best order that is found for these times in this memory, with stages in a loop or in a V, and its bound.

    Never worse than any schedule that there is by name, takes as many chunks, places stages so, and fits: it begins
    with those and with orders by `policies`, and goes on with the best by small changes. Backwards are split where that
    is faster. For the same question the answer is always the same. Raises `DistIRError` where no order fits into the
    memory: one microbatch has to.
    """
    times.fit(shape.stages, shape.microbatches)
    if memory:
        memory.fit(shape.ranks, shape.stages)
    split, whole = _problems(shape, times, memory, split=True), _problems(shape, times, memory, split=False)
    bound = min(lower_bound(problem) * problem.unit for problem in split)
    known = list(orders_by_shape(shape))
    # Whole backwards are worth no more than two policies: a split one can do whatever a whole one does.
    best_whole = _best(whole, known, bound, count=2)[0]
    if best_whole.makespan > bound:
        starts = _best(split, known, bound, count=8)
        best = min((_improved(candidate, bound) for candidate in starts), key=lambda found: found.makespan)
        if best.makespan < best_whole.makespan:
            return Found(with_whole_backwards(best.problem, best.run), best.makespan, bound)
    return Found(best_whole.problem.order(best_whole.run.rows), best_whole.makespan, bound)


@scheduler("auto", chunks=None)
def auto(shape: Shape, times: Times, memory: Memory | None) -> Order:
    """The order that `best_order` finds."""
    return best_order(shape, times, memory).order


@dataclass(frozen=True, slots=True)
class _Candidate:
    problem: Problem
    run: Run

    @property
    def makespan(self) -> Number:
        return self.run.makespan * self.problem.unit


def _problems(shape: Shape, times: Times, memory: Memory | None, split: bool) -> list[Problem]:
    """One for each place of stages for which there is room."""
    found = [Problem(shape, place, times, memory, split) for place in sorted({shape.loop(), shape.vee()})]
    errors = [problem.lack() for problem in found]
    if all(errors):
        raise next(filter(None, errors))
    return [problem for problem, error in zip(found, errors, strict=True) if not error]


def _best(problems: list[Problem], known: list[Order], bound: Number, count: int) -> list[_Candidate]:
    """The shortest among known orders and those by policies, first the best; or one that is at the bound."""
    found: dict[Number, _Candidate] = {}
    for candidate in chain(*(_known(problem, known) for problem in problems), _by_policies(problems, count)):
        found.setdefault(candidate.makespan, candidate)
        if candidate.makespan <= bound:
            break
    return [found[makespan] for makespan in sorted(found)][:_STARTS]


def _improved(candidate: _Candidate, bound: Number) -> _Candidate:
    problem = candidate.problem
    effort = _STEPS // (_STARTS * problem.count)
    return _Candidate(problem, improved(problem, candidate.run, bound / problem.unit, effort))


def _known(problem: Problem, known: list[Order]) -> Iterator[_Candidate]:
    """Orders of schedules that look at the shape alone, where they can be had and fit."""
    for order in known:
        if order.rank_of == problem.rank_of and (problem.split or not order.splits):
            rows = problem.rows(order)
            complete = sorted(chain(*rows)) == list(range(problem.count))
            if complete and all(problem.keeps(rank, row) for rank, row in enumerate(rows)):
                found = run(problem, rows)
                if found:
                    yield _Candidate(problem, found)


def _by_policies(problems: list[Problem], count: int) -> Iterator[_Candidate]:
    """Orders by up to so many policies: the first two for all places of stages, the others for the best of these."""
    shortest: list[Number] = [math.inf] * len(problems)
    for number, chosen in enumerate(islice(zip(*map(policies, problems), strict=True), count)):
        for i, (problem, policy) in enumerate(zip(problems, chosen, strict=True)):
            if number < 2 or shortest[i] <= min(shortest):
                found = run(problem, list_schedule(problem, policy))
                if found:  # always: a rank that does what has come to it waits for nothing
                    shortest[i] = min(shortest[i], found.makespan * problem.unit)
                    yield _Candidate(problem, found)


def _shown(number: Number) -> str:
    return str(int(number)) if number == int(number) else f"{float(number):.6g}"
