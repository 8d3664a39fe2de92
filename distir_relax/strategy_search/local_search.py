"""Local search, for spaces of too many strategies to simulate.

The training of a model that is a chain of equal blocks has lower bounds (`step_bounds`): the candidates with the least
bounds are tried, until those of all others are above the best. For other models, or if bounds rule out too few:

1. Each D x T x P is tried once, with the most microbatches, and the least ZeRO that leaves room; those that need more
   ZeRO only if none with less fits. A pipeline whose bubble alone makes it slower than the best is skipped.
2. Around the best one, one option at a time is changed, a number to its neighbor in the list, until nothing is faster.
3. Then skipped degrees are tried, the neighbors of the next best degrees, and finally all candidates, until the budget
   is used: many candidates of a small model, few of one whose program is long.

Candidates are chosen in rounds of `ROUND`, whatever the number of workers, so their outcomes do not depend on it, nor
on whether the search was interrupted. Each outcome is that of `Source.simulate`. If not all are tried or ruled out, the
fastest may be missed: two options may only be good together.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.strategies.strategy import OPTIONS, Strategy
from distir_relax.strategy_search.evaluate import Draw, Evaluator
from distir_relax.strategy_search.grid_search import OutcomeCallback, Search, outcomes_of
from distir_relax.strategy_search.lower_bounds import KEEPS_TOO_MUCH, TOO_SLOW, LowerBounds
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.results_file import ResultsFile, open_results
from distir_relax.strategy_search.search_space import Candidate, Space
from distir_relax.strategy_search.step_bounds import StepBounds

COMFORTABLE = 0.4
"""Preferred upper limit of weights, gradients and state, as a fraction of a device's memory, for first candidates."""
ROUND = 4
"""How many candidates are simulated before the next are chosen."""
OP_BUDGET = 75_000
"""Budget of ops over all tried programs; beyond it only neighbors of the best are tried."""
_BOUNDED = 4
"""The factor of the budget with lower bounds: they may rule out all that is left."""


def search_locally(
    source: Source,
    profile: Profile,
    space: Space,
    *,
    workers: int | None = None,
    resume: str | Path | None = None,
    executor: Executor | None = None,
    on_outcome: OutcomeCallback | None = None,
    draw: Draw | None = None,
    op_budget: int = OP_BUDGET,
) -> Search:
    """Search as `search_grid` does, but try only some candidates; others are ruled out or left untried.

    Only neighbors of the best are tried after programs of `op_budget` ops in total, as counted in the model. Raises as
    `search_grid` does.
    """
    start = time.perf_counter()
    search = _LocalSearch(
        source, profile, space, workers or os.cpu_count() or 1, open_results(resume, source, profile), executor,
        on_outcome, draw,
    )  # fmt: skip
    search.rule_out()
    limit = op_budget // max(1, sum(len(function.ops) for function in source.imported.module.functions))
    while batch := search.least_bounds(_BOUNDED * limit):
        search.run(batch)
    for tier in [] if search.fits else search.firsts():
        while batch := search.promising(tier)[:ROUND]:
            search.run([*batch, *search.speculative(ROUND - len(batch))])
        if search.fits:
            break
    while batch := search.neighbors_of_best(limit)[:ROUND]:
        search.run(batch)
    search.rule_out_slow()
    outcomes = tuple(search.outcomes.values())
    untried = sum(candidate not in search.outcomes for group in search.groups.values() for candidate in group)
    return Search(space, profile, outcomes, search.resumed, time.perf_counter() - start, search.evaluator, untried)


@dataclass
class _LocalSearch:
    source: Source
    profile: Profile
    space: Space
    workers: int
    results: ResultsFile | None
    executor: Executor | None
    on_outcome: OutcomeCallback | None
    draw: Draw | None
    evaluator: Evaluator = field(init=False)
    lower_bounds: LowerBounds = field(init=False)
    bounds: StepBounds | None = None
    least: dict[Candidate, float] = field(default_factory=dict)
    """The least time of the step of each candidate, if there are bounds."""
    with_data: set[Candidate] = field(default_factory=set)
    """The candidates whose bounds include the traffic of data parallelism."""
    groups: dict[object, list[Candidate]] = field(default_factory=dict)
    """The candidates that may fit, by D x T x P and batch."""
    outcomes: dict[Candidate, Outcome] = field(default_factory=dict)
    best_seconds: dict[int, float] = field(default_factory=dict)
    """The shortest step of each batch."""
    resumed: int = 0
    """The number of outcomes that an earlier search left."""

    def __post_init__(self) -> None:
        # Few candidates share a form, so each is compiled by itself.
        self.evaluator = Evaluator(self.source, self.profile, draw=self.draw)
        self.lower_bounds = LowerBounds(self.source, self.profile)

    @property
    def fits(self) -> bool:
        """Return whether any outcome fits."""
        return any(outcome.fits for outcome in self.outcomes.values())

    def rule_out(self) -> None:
        """Group the candidates; those that are ruled out get an outcome."""
        left = []
        for candidate in self.space.candidates():
            if reason := self.lower_bounds.refusal(candidate.strategy):
                self._refuse(candidate, reason)
            else:
                left.append(candidate)
        self.bounds = StepBounds.of(self.source, self.profile, left)
        if self.bounds is not None:
            self.bounds.prepare(left, False, self._processes)
            self.least = {candidate: self.bounds.seconds(candidate) for candidate in left}
        for candidate in left:
            if self.least.get(candidate, 0.0) == math.inf:
                self._refuse(candidate, KEEPS_TOO_MUCH)
            else:
                self.groups.setdefault(_group(candidate), []).append(candidate)

    def least_bounds(self, limit: int) -> list[Candidate]:
        """Return the untried candidates with the least bounds, if there are any and fewer than `limit` were tried.

        A bound without the traffic of data parallelism is computed again with it before its candidate is tried.
        """
        if self.bounds is None or sum(not outcome.refused for outcome in self.outcomes.values()) >= limit:
            return []
        while True:
            left = [c for group in self.groups.values() for c in group if self._is_open(c)]
            left.sort(key=lambda c: (self.least[c], str(c.strategy), c.samples))
            batch = left[:ROUND]
            if self.with_data.issuperset(batch):
                return batch
            # Several of the next ones, for all processes.
            unsure = [candidate for candidate in left if candidate not in self.with_data][: 2 * ROUND]
            self.bounds.prepare(unsure, True, self._processes)
            self.least.update({candidate: self.bounds.seconds(candidate, True) for candidate in unsure})
            self.with_data.update(unsure)

    def rule_out_slow(self) -> None:
        """Give an outcome to the candidates that the best of their batch rules out."""
        for candidate in [c for group in self.groups.values() for c in group]:
            if candidate not in self.outcomes and not self._is_open(candidate):
                self._refuse(candidate, TOO_SLOW)

    def firsts(self) -> list[list[Candidate]]:
        """Return the first candidate of each group, in tiers of ZeRO: up to stage 1, then more.

        Within a tier the smallest bubble comes first.
        """
        tiers: dict[int, list[Candidate]] = {}
        for candidate in sorted((min(group, key=self.rank) for group in self.groups.values()), key=_bubble):
            tiers.setdefault(max(candidate.strategy.zero, 1), []).append(candidate)
        return [tiers[zero] for zero in sorted(tiers)]

    def promising(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return untried candidates that would be the fastest with the best's compute time and no communication."""
        best: dict[int, tuple[float, float]] = {}
        for outcome in filter(lambda o: o.fits, self.outcomes.values()):
            compute = outcome.seconds * (1.0 - outcome.bubble - outcome.communication)
            best[outcome.samples] = min(
                best.get(outcome.samples, (outcome.seconds, compute)), (outcome.seconds, compute)
            )
        untried = [candidate for candidate in candidates if self._is_open(candidate)]
        for samples, (seconds, compute) in best.items():
            untried = [c for c in untried if c.samples != samples or compute * (1.0 + _bubble(c)) < seconds]
        return untried

    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the sort key of the first candidate of a group."""
        s, space = candidate.strategy, self.space
        is_tight = self.lower_bounds.bytes(s) > COMFORTABLE * self.profile.memory
        ranks = (option.search_rank(s[name], space.values[name]) for name, option in OPTIONS.items())
        return is_tight, -s.microbatches, *ranks

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Simulate candidates, except those that an earlier search has simulated."""
        earlier = {} if self.results is None else self.results.outcomes
        found = {candidate: earlier[candidate] for candidate in candidates if candidate in earlier}
        self.resumed += len(found)
        remaining = [candidate for candidate in candidates if candidate not in found]
        for outcome in outcomes_of(self.evaluator, remaining, self.workers, self.executor):
            found[outcome.candidate] = outcome
            if self.results is not None:
                self.results.add(outcome)
        # In the order in which they were chosen, not in that in which workers finished.
        for candidate in candidates:
            self._record(found[candidate])

    def speculative(self, count: int) -> list[Candidate]:
        """Return up to `count` candidates for idle workers: those tried next if the best does not change."""
        return self.neighbors_of_best(0)[:count] if self.fits else []

    def neighbors_of_best(self, limit: int) -> list[Candidate]:
        """Return the untried neighbors of the best for each batch: one option differs.

        If there are none, and fewer than `limit` were tried: skipped degrees, then neighbors of the next best degrees,
        and finally all others.
        """
        candidates: list[Candidate] = []
        tried = sum(not outcome.refused for outcome in self.outcomes.values())
        for samples in self.space.batches:
            steps = self._candidate_tiers(samples)
            distance, first = next(steps, (0, []))
            if distance == 0 or tried + len(candidates) < limit:
                candidates += first if distance == 0 else first[: limit - tried - len(candidates)]
        return candidates

    def _candidate_tiers(self, samples: int) -> Iterator[tuple[int, list[Candidate]]]:
        """Yield the candidates to try next for a batch, with their distance: 0 for neighbors of the best."""
        groups = self._best(samples)
        neighbors = [self._neighbors(outcome, group) for outcome, group in groups]
        tried_groups = [group for _, group in groups]
        others = [group for group in self.groups.values() if group[0].samples == samples and group not in tried_groups]
        skipped = sorted((min(group, key=self.rank) for group in others), key=_bubble)
        for distance, tier in enumerate([*neighbors[:1], skipped, *neighbors[1:], *tried_groups]):
            if candidates := [candidate for candidate in tier if self._is_open(candidate)]:
                yield distance, candidates

    def _neighbors(self, outcome: Outcome, group: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates of a group that differ from an outcome in one option."""
        best = outcome.candidate.strategy
        return [c for c in group if self._are_neighbors(c.strategy, best)]

    def _are_neighbors(self, other: Strategy, best: Strategy) -> bool:
        """Return whether two strategies of the same degrees differ in one option, a number by one place in its list."""
        counts = sorted(self.space.microbatches)
        count_steps = abs(counts.index(other.microbatches) - counts.index(best.microbatches)) if other != best else 0
        changed = [option for name, option in OPTIONS.items() if other[name] != best[name]]
        is_step = all(option.are_neighbors(other[option.name], best[option.name]) for option in changed)
        return count_steps < 2 and is_step and (count_steps > 0) + len({option.group for option in changed}) == 1

    def _best(self, samples: int) -> list[tuple[Outcome, list[Candidate]]]:
        """Return the best outcome of each group of a batch, the best first."""
        best = []
        for group in self.groups.values():
            tried = [self.outcomes[c] for c in group if c in self.outcomes]
            if group[0].samples == samples and tried:
                best.append((min(tried, key=_sort_key), group))
        return sorted(best, key=lambda pair: _sort_key(pair[0]))

    @property
    def _processes(self) -> int:
        """The number of processes to compute bounds in: under mpirun the first rank alone does it."""
        return self.workers if self.executor is None else 1

    def _is_open(self, candidate: Candidate) -> bool:
        """Return whether a candidate is neither tried, nor ruled out by its bound and the best of its batch."""
        best = self.best_seconds.get(candidate.samples, math.inf)
        return candidate not in self.outcomes and self.least.get(candidate, 0.0) < best

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        self._record(Outcome(str(candidate.strategy), candidate.samples, refused=reason))

    def _record(self, outcome: Outcome) -> None:
        self.outcomes[outcome.candidate] = outcome
        if outcome.fits:
            best = self.best_seconds.get(outcome.samples, math.inf)
            self.best_seconds[outcome.samples] = min(best, outcome.seconds)
        if self.on_outcome is not None:
            self.on_outcome(outcome, len(self.outcomes))


def _sort_key(outcome: Outcome) -> tuple[bool, bool, float, str]:
    """Return a sort key, the best first: by time if it fits, else by memory; refused ones last."""
    value = outcome.seconds if outcome.fits else float(outcome.memory)
    return bool(outcome.refused), not outcome.fits, value, outcome.strategy


def _bubble(candidate: Candidate) -> float:
    """Return the bubble of a pipeline as a fraction of its compute time, if all stages take equally long."""
    strategy = candidate.strategy
    return (strategy.pipeline - 1) / float(strategy.microbatches * strategy.chunks)


def _group(candidate: Candidate) -> object:
    s = candidate.strategy
    return s.data, s.tensor, s.pipeline, candidate.samples
