"""A search by steps, for models and machines of which all strategies are too many to simulate.

First each D x T x P is tried once, with as many microbatches as there are, and as little ZeRO as leaves room; those
that need more of it only where none with less fits. Around the best of them one option at a time is changed, a number
to the next one, until nothing is faster. Each outcome is that of `Source.simulate`. The fastest of all may be missed:
where two options are good together only, or degrees that begin slowly would become the fastest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.cost.profile import Profile
from distir_relax.planner.evaluate import Evaluator
from distir_relax.planner.grid import Search, Told, outcomes_of
from distir_relax.planner.least import Least
from distir_relax.planner.outcome import Outcome
from distir_relax.planner.space import Candidate, Space
from distir_relax.source import Source
from distir_relax.strategies.strategy import Strategy

COMFORTABLE = 0.4
"""Weights, gradients and state of the first that is tried take no more of a device's memory than this, if any do."""


def search_by_steps(
    source: Source, profile: Profile, space: Space, *, workers: int | None = None, told: Told | None = None
) -> Search:
    """As `search_grid`, of some of the candidates: those that were tried, and those that could be ruled out."""
    start = time.perf_counter()
    climb = _Climb(source, profile, space, workers or os.cpu_count() or 1, told)
    climb.rule_out()
    for tier in climb.firsts():
        climb.run(tier)
        if any(outcome.fits for outcome in climb.found.values()):
            break
    while wanted := climb.around_the_best():
        climb.run(wanted)
    outcomes = tuple(climb.found.values())
    return Search(space, profile, outcomes, 0, time.perf_counter() - start, climb.evaluator)


@dataclass
class _Climb:
    source: Source
    profile: Profile
    space: Space
    workers: int
    told: Told | None
    evaluator: Evaluator = field(init=False)
    least: Least = field(init=False)
    groups: dict[object, list[Candidate]] = field(default_factory=dict)
    """The candidates that may fit, by D x T x P and batch."""
    found: dict[Candidate, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Few candidates are of one form: each is compiled by itself.
        self.evaluator = Evaluator(self.source, self.profile)
        self.least = Least(self.source, self.profile)

    def rule_out(self) -> None:
        """Sort the candidates into groups; those that cannot be have their outcome."""
        for candidate in self.space.candidates():
            if reason := self.least.refusal(candidate.strategy):
                self._note(Outcome(str(candidate.strategy), candidate.samples, refused=reason))
            else:
                self.groups.setdefault(_group(candidate), []).append(candidate)

    def firsts(self) -> list[list[Candidate]]:
        """The first of each group, by how much ZeRO they need: none or the state's parts alone, then more.

        Pipelines that wait for a third of the time or more are among them only if there are no others.
        """
        found = [min(group, key=self.rank) for group in self.groups.values()]
        busy = [c for c in found if 2 * (c.strategy.pipeline - 1) <= c.strategy.microbatches * c.strategy.chunks]
        tiers: dict[int, list[Candidate]] = {}
        for candidate in busy or found:
            tiers.setdefault(max(candidate.strategy.zero, 1), []).append(candidate)
        return [tiers[zero] for zero in sorted(tiers)]

    def rank(self, candidate: Candidate) -> tuple[int, ...]:
        """Which candidate of a group is tried first."""
        s, space = candidate.strategy, self.space
        order = space.schedules.index(s.schedule) if s.schedule in space.schedules else 0
        tight = self.least.bytes(s) > COMFORTABLE * self.profile.memory
        return (
            tight,
            -s.microbatches,
            space.checkpoint.index(s.checkpoint),
            order,
            s.chunks,
            s.zero,
            -s.sequence_parallel,
        )

    def run(self, wanted: Sequence[Candidate]) -> None:
        """Simulate candidates."""
        for outcome in outcomes_of(self.evaluator, wanted, self.workers, None):
            self._note(outcome)

    def around_the_best(self) -> list[Candidate]:
        """What is not tried yet and differs in one option from the best for each batch."""
        wanted: dict[Candidate, None] = {}
        for samples in self.space.batches:
            for outcome, group in self._best(samples)[:1]:
                best = outcome.candidate.strategy
                near = (c for c in group if c not in self.found and self._is_near(c.strategy, best))
                wanted.update(dict.fromkeys(near))
        return list(wanted)

    def _is_near(self, one: Strategy, best: Strategy) -> bool:
        """Whether two strategies of the same degrees differ in one option, a number by one place of its list."""
        counts = sorted(self.space.microbatches)
        apart = abs(counts.index(one.microbatches) - counts.index(best.microbatches)) if one != best else 0
        stages = abs(one.zero - best.zero)
        others = [(s.schedule, s.chunks) for s in (one, best)], [s.checkpoint for s in (one, best)]
        changed = [a != b for a, b in (*others, (one.sequence_parallel, best.sequence_parallel))]
        return apart < 2 and stages < 2 and sum([apart > 0, stages > 0, *changed]) == 1

    def _best(self, samples: int) -> list[tuple[Outcome, list[Candidate]]]:
        """The best of each group of a batch, the best first."""
        found = []
        for group in self.groups.values():
            tried = [self.found[c] for c in group if c in self.found]
            if group[0].samples == samples and tried:
                found.append((min(tried, key=_merit), group))
        return sorted(found, key=lambda pair: _merit(pair[0]))

    def _note(self, outcome: Outcome) -> None:
        self.found[outcome.candidate] = outcome
        if self.told is not None:
            self.told(outcome, len(self.found))


def _merit(outcome: Outcome) -> tuple[bool, bool, float, str]:
    """Less is better: what fits by its time, then what does not by its memory, then what cannot be compiled."""
    size = outcome.seconds if outcome.fits else float(outcome.memory)
    return bool(outcome.refused), not outcome.fits, size, outcome.strategy


def _group(candidate: Candidate) -> object:
    s = candidate.strategy
    return s.data, s.tensor, s.pipeline, candidate.samples
