"""The nearest strategy that fits: where memory does not suffice, the least change of a strategy with which it does.

Changes are tried in the order of the time that they cost. They come as ladders, on each of which memory falls: the last
rung is tried first, and where that does not fit, none of its ladder is looked at further.

=============  ========================================================================================
ladder         rungs
=============  ========================================================================================
ZeRO           optimizer state in parts, then gradients (training, several data-parallel ranks)
microbatches   twice, four times, eight times as many, as far as the batch goes
checkpoints    cheap ops of blocks computed again, then whole blocks (training)
ZeRO 3         parameters in parts, gathered for each use
together       several of these, each by itself
other splits   the same devices, another data and tensor degree: as given, then with all of these
more devices   twice as many, then four times: along data, along tensor, then with all of these
=============  ========================================================================================

More microbatches are not part of what is tried together where they do not help: the gradients that are added up take
more than is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from distir_relax.analysis.simulation import Alternative, Simulation
from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import Strategy

MOST = 12
"""How many strategies are compiled and simulated at most."""

_PARTS = (2, 4, 8)
_STRONGER = {"none": ("selective", "block"), "selective": ("block",), "block": ()}


def nearest_fit(
    found: Simulation, given: Strategy, training: bool, batch: int | None, simulate: Callable[[Strategy], Simulation]
) -> Alternative | None:
    """The nearest strategy that fits; where none does, what needs least of those tried; None where nothing could be.

    `found` is the simulation of `given`, which does not fit, `simulate` that of another strategy; one for which it
    raises `DistIRError` is no candidate. At most `MOST` are simulated. `training` is whether the program has gradients
    and an optimizer, `batch` its number of samples, where that is known.
    """
    search = _Search(found, given, simulate)
    changes = _Changes(training, batch)
    nearest = search.climb(changes.single(given))
    if nearest is None:
        helps = any(search.saves(strategy) for strategy in changes.more_parts(given))
        nearest = search.climb(replace(changes, parts_help=helps).several(given))
    return search.alternative(nearest)


class _Search:
    """The strategies that were simulated, and what was found."""

    def __init__(self, found: Simulation, given: Strategy, simulate: Callable[[Strategy], Simulation]) -> None:
        self._found = found
        self._simulate = simulate
        self._tried: dict[Strategy, Simulation | None] = {given: None}

    @property
    def _known(self) -> dict[Strategy, Simulation]:
        return {strategy: simulation for strategy, simulation in self._tried.items() if simulation is not None}

    def climb(self, ladders: Sequence[Sequence[Strategy]]) -> Strategy | None:
        """The first rung that fits of the first of the `ladders` whose last rung does."""
        for ladder in ladders:
            last = next((s for rung in reversed(ladder) if (s := self._run(rung)) is not None), None)
            if last is not None and last.fits:
                return next(rung for rung in ladder if (s := self._run(rung)) is not None and s.fits)
        return None

    def saves(self, strategy: Strategy) -> bool:
        """Whether a strategy that was tried needs less than what does not fit."""
        simulation = self._tried.get(strategy)
        return simulation is not None and _filled(simulation) < _filled(self._found)

    def alternative(self, nearest: Strategy | None) -> Alternative | None:
        """What is said of the strategy found, or of the one that needs least."""
        known = self._known
        if not known:
            return None
        chosen = nearest or min(known, key=lambda strategy: _filled(known[strategy]))
        found = known[chosen]
        times = found.makespan / self._found.makespan
        peak = int(found.peak_memory[found.fullest])
        return Alternative(str(chosen), found.devices, found.fits, peak, times, len(known))

    def _run(self, strategy: Strategy) -> Simulation | None:
        is_possible = strategy.devices <= self._found.profile.devices and len(self._known) < MOST
        if strategy not in self._tried and is_possible:
            try:
                self._tried[strategy] = self._simulate(strategy)
            except DistIRError:
                self._tried[strategy] = None
        return self._tried.get(strategy)


@dataclass(frozen=True, slots=True)
class _Changes:
    """What a strategy can be changed by, for a program with a `batch` of so many samples, where that is known."""

    training: bool
    batch: int | None
    parts_help: bool = True

    def single(self, given: Strategy) -> list[list[Strategy]]:
        """The ladders of one change each."""
        kinds = _STRONGER[given.checkpoint] if self.training else ()
        return [
            [self._zero(given, stage) for stage in (1, 2)] if self.training else [],
            self.more_parts(given),
            [replace(given, checkpoint=kind) for kind in kinds],
            [self._zero(given, 3)],
        ]

    def several(self, given: Strategy) -> list[list[Strategy]]:
        """The ladders of several changes, of other splits, and of more devices."""
        grown = [
            [replace(given, data=given.data * times), replace(given, tensor=given.tensor * times)] for times in (2, 4)
        ]
        ladders = [[together] for together in self._together(given)]
        ladders += [[split, self._all(split)] for split in _other_splits(given)]
        # Along data where there are samples for it: ZeRO has more ranks then.
        ladders += [[*more, self._all(next(filter(self._has_samples, more)))] for more in grown]
        return [[strategy for strategy in ladder if self._has_samples(strategy)] for ladder in ladders]

    def more_parts(self, given: Strategy) -> list[Strategy]:
        """More microbatches, as far as the batch goes."""
        found = [replace(given, microbatches=given.microbatches * times) for times in _PARTS]
        return [strategy for strategy in found if self._has_samples(strategy)]

    def _together(self, given: Strategy) -> list[Strategy]:
        """Several changes at once, first those that cost less time."""
        parts = (self.more_parts(given) or [given])[-1] if self.parts_help else given
        if not self.training:
            return [self._zero(parts, 3)]
        block, both = replace(given, checkpoint="block"), replace(parts, checkpoint="block")
        return [self._zero(parts, 2), self._zero(block, 2), self._zero(both, 2), self._zero(both, 3)]

    def _all(self, given: Strategy) -> Strategy:
        return self._together(given)[-1]

    def _zero(self, given: Strategy, stage: int) -> Strategy:
        """With ZeRO of at least this stage, where that does anything."""
        return replace(given, zero=max(given.zero, stage)) if given.data > 1 else given

    def _has_samples(self, strategy: Strategy) -> bool:
        """Whether there is a sample for each microbatch of each data-parallel rank."""
        return self.batch is None or strategy.data * strategy.microbatches <= self.batch


def _other_splits(given: Strategy) -> list[Strategy]:
    """The two data and tensor degrees nearest to those given, of the same product; more tensor first."""
    ranks = given.data * given.tensor
    degrees = [t for t in range(1, ranks + 1) if ranks % t == 0 and t != given.tensor]
    nearest = sorted(degrees, key=lambda t: (abs(log(t / given.tensor)), -t))[:2]
    return [replace(given, data=ranks // t, tensor=t, zero=given.zero if t < ranks else 0) for t in nearest]


def _filled(simulation: Simulation) -> float:
    """The largest part of a device's memory that is in use."""
    return float((simulation.peak_memory / simulation.memory).max())
