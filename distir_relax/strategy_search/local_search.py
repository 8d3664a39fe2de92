"""A search by steps, for models and machines of which all strategies are too many to simulate.

First each D x T x P is tried once, with as many microbatches as there are, and as little ZeRO as leaves room; those
that need more of it only where none with less fits. A pipeline that would wait too long, even if it computed as fast as
the best and sent nothing, is passed over. Around the best one option at a time is changed, a number to the next one,
until nothing is faster. Then come degrees that were passed over, the same around the best of the next best degrees, and
so on to all candidates, until as many were tried as are worth the while: many of a small model, few of one whose
program is long. Each outcome is that of `Source.simulate`. Where not all were tried the fastest may be missed: two
options may be good together only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.evaluate import Draw, Evaluator
from distir_relax.strategy_search.grid_search import Search, Told, outcomes_of
from distir_relax.strategy_search.lower_bounds import Least
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.search_space import Candidate, Space

COMFORTABLE = 0.4
"""Weights, gradients and state of the first that is tried take no more of a device's memory than this, if any do."""
WORTH = 75_000
"""While the ops of all that was tried are fewer, other degrees than the best are looked at more closely."""


def search_by_steps(
    source: Source,
    profile: Profile,
    space: Space,
    *,
    workers: int | None = None,
    told: Told | None = None,
    draw: Draw | None = None,
    worth: int = WORTH,
) -> Search:
    """As `search_grid`, of some of the candidates: those that were tried, and those that could be ruled out.

    Around degrees that are not the best no more is tried once programs of `worth` ops were, as the model has them.
    """
    start = time.perf_counter()
    climb = _Climb(source, profile, space, workers or os.cpu_count() or 1, told, draw)
    climb.rule_out()
    for tier in climb.firsts():
        while wanted := climb.not_slower(tier)[: climb.workers]:
            climb.run([*wanted, *climb.beside(climb.workers - len(wanted))])
        if climb.fits:
            break
    ops = sum(len(function.ops) for function in source.imported.module.functions)
    while wanted := climb.around_the_best(worth // max(1, ops)):
        climb.run(wanted)
    outcomes = tuple(climb.found.values())
    left = sum(candidate not in climb.found for group in climb.groups.values() for candidate in group)
    return Search(space, profile, outcomes, 0, time.perf_counter() - start, climb.evaluator, left)


@dataclass
class _Climb:
    source: Source
    profile: Profile
    space: Space
    workers: int
    told: Told | None
    draw: Draw | None
    evaluator: Evaluator = field(init=False)
    least: Least = field(init=False)
    groups: dict[object, list[Candidate]] = field(default_factory=dict)
    """The candidates that may fit, by D x T x P and batch."""
    found: dict[Candidate, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Few candidates are of one form: each is compiled by itself.
        self.evaluator = Evaluator(self.source, self.profile, draw=self.draw)
        self.least = Least(self.source, self.profile)

    @property
    def fits(self) -> bool:
        """Whether anything that was tried fits."""
        return any(outcome.fits for outcome in self.found.values())

    def rule_out(self) -> None:
        """Sort the candidates into groups; those that cannot be have their outcome."""
        for candidate in self.space.candidates():
            if reason := self.least.refusal(candidate.strategy):
                self._note(Outcome(str(candidate.strategy), candidate.samples, refused=reason))
            else:
                self.groups.setdefault(_group(candidate), []).append(candidate)

    def firsts(self) -> list[list[Candidate]]:
        """The first of each group, by how much ZeRO they need: none or the state's parts alone, then more.

        Those that wait least come first.
        """
        tiers: dict[int, list[Candidate]] = {}
        for candidate in sorted((min(group, key=self.rank) for group in self.groups.values()), key=_waiting):
            tiers.setdefault(max(candidate.strategy.zero, 1), []).append(candidate)
        return [tiers[zero] for zero in sorted(tiers)]

    def not_slower(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those not tried that would be the fastest if they computed as fast as the best does and sent nothing."""
        least: dict[int, tuple[float, float]] = {}
        for outcome in filter(lambda o: o.fits, self.found.values()):
            works = outcome.seconds * (1.0 - outcome.bubble - outcome.communication)
            least[outcome.samples] = min(least.get(outcome.samples, (outcome.seconds, works)), (outcome.seconds, works))
        found = [candidate for candidate in candidates if candidate not in self.found]
        for samples, (seconds, works) in least.items():
            found = [c for c in found if c.samples != samples or works * (1.0 + _waiting(c)) < seconds]
        return found

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

    def beside(self, count: int) -> list[Candidate]:
        """So many candidates for workers that would have nothing to do: what will be tried if the best stays it."""
        return self.around_the_best(0)[:count] if self.fits else []

    def around_the_best(self, enough: int) -> list[Candidate]:
        """What is not tried yet and differs in one option from the best for each batch.

        If there is nothing, and fewer than `enough` were tried: the first of degrees that were passed over, what is one
        option from the best of the next best degrees, and at last what differs in several.
        """
        wanted: list[Candidate] = []
        tried = sum(not outcome.refused for outcome in self.found.values())
        for samples in self.space.batches:
            steps = self._next(samples)
            number, first = next(steps, (0, []))
            if number == 0 or tried + len(wanted) < enough:
                wanted += first if number == 0 else first[: enough - tried - len(wanted)]
        return wanted

    def _next(self, samples: int) -> Iterator[tuple[int, list[Candidate]]]:
        """What to try next for a batch, by how near it is to the best: 0 for what differs from that in one option."""
        groups = self._best(samples)
        near = [self._near(outcome, group) for outcome, group in groups]
        known = [group for _, group in groups]
        others = [group for group in self.groups.values() if group[0].samples == samples and group not in known]
        passed_over = sorted((min(group, key=self.rank) for group in others), key=_waiting)
        left = [[c for c in group if c not in self.found] for group in known]
        for number, wanted in enumerate([*near[:1], passed_over, *near[1:], *left]):
            if wanted:
                yield number, wanted

    def _near(self, outcome: Outcome, group: Sequence[Candidate]) -> list[Candidate]:
        """What is not tried yet of a group and differs in one option from an outcome."""
        best = outcome.candidate.strategy
        return [c for c in group if c not in self.found and self._is_near(c.strategy, best)]

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


def _waiting(candidate: Candidate) -> float:
    """For what part of the time that it works a device of a pipeline waits, where all stages take as long."""
    strategy = candidate.strategy
    return (strategy.pipeline - 1) / (strategy.microbatches * strategy.chunks)


def _group(candidate: Candidate) -> object:
    s = candidate.strategy
    return s.data, s.tensor, s.pipeline, candidate.samples
