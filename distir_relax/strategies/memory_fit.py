"""Find the nearest strategy that fits in memory: the least change of a strategy that does not fit.

Changes are tried in the order of their time cost. They come as ladders, along which memory falls: the last rung is
tried first, and if it does not fit, the other rungs are skipped. Options declare their ladders (`StrategyOption`); with
those of this package they are:

=============  ========================================================================================
ladder         rungs
=============  ========================================================================================
ZeRO           shard the optimizer state, then gradients (training, several data-parallel ranks)
microbatches   two, four, eight times the number, up to the batch size
checkpoint     recompute cheap ops of blocks, then whole blocks (training)
ZeRO 3         shard parameters, gathered for each use
together       several of these at once
other splits   the same devices, another data and tensor degree: as given, then with all of these
more devices   twice as many, then four times: along data, along tensor, then with all of these
=============  ========================================================================================

More microbatches are not combined with other changes if they do not help by themselves: accumulated gradients can take
more memory than they save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from distir_relax.errors import DistIRError
from distir_relax.simulation.simulation import Alternative, Simulation
from distir_relax.strategies.strategy import OPTIONS, Ladder, Strategy

MOST = 12
"""Maximum number of strategies that are compiled and simulated."""

_MICROBATCH_FACTORS = (2, 4, 8)
_MICROBATCH_COST = 1.0
"""The cost of the ladder of microbatches, among those of options (`Ladder.cost`)."""


def nearest_fit(
    original: Simulation,
    strategy: Strategy,
    training: bool,
    batch: int | None,
    simulate: Callable[[Strategy], Simulation],
) -> Alternative | None:
    """Return the nearest strategy that fits, else the one tried that needs least; None if none was simulated.

    `original` is the simulation of `strategy`, which does not fit; `simulate` simulates another strategy, and excludes
    it by a `DistIRError`. At most `MOST` are simulated. `training` is whether the program has gradients and an
    optimizer, `batch` its number of samples, if known.
    """
    search = _Search(original, strategy, simulate)
    changes = _Changes(training, batch)
    nearest = search.climb(changes.single(strategy))
    if nearest is None:
        helps = any(search.saves(strategy) for strategy in changes.more_microbatches(strategy))
        nearest = search.climb(replace(changes, microbatches_help=helps).several(strategy))
    return search.alternative(nearest)


class _Search:
    """The strategies that were simulated, and their simulations."""

    def __init__(self, simulation: Simulation, strategy: Strategy, simulate: Callable[[Strategy], Simulation]) -> None:
        self._original = simulation
        self._simulate = simulate
        self._tried: dict[Strategy, Simulation | None] = {strategy: None}

    @property
    def _simulated(self) -> dict[Strategy, Simulation]:
        return {strategy: simulation for strategy, simulation in self._tried.items() if simulation is not None}

    def climb(self, ladders: Sequence[Sequence[Strategy]]) -> Strategy | None:
        """Return the first rung that fits, of the first of the `ladders` whose last rung does."""
        for ladder in ladders:
            last = next((s for rung in reversed(ladder) if (s := self._try_strategy(rung)) is not None), None)
            if last is not None and last.fits:
                return next(rung for rung in ladder if (s := self._try_strategy(rung)) is not None and s.fits)
        return None

    def saves(self, strategy: Strategy) -> bool:
        """Return whether a strategy that was tried needs less memory than the original one."""
        simulation = self._tried.get(strategy)
        return simulation is not None and _memory_fraction(simulation) < _memory_fraction(self._original)

    def alternative(self, nearest: Strategy | None) -> Alternative | None:
        """Return the record of the strategy that fits, or of the one that needs least."""
        simulated = self._simulated
        if not simulated:
            return None
        chosen = nearest or min(simulated, key=lambda strategy: _memory_fraction(simulated[strategy]))
        best = simulated[chosen]
        slowdown = best.makespan / self._original.makespan
        peak = int(best.peak_memory[best.fullest])
        return Alternative(str(chosen), best.devices, best.fits, peak, slowdown, len(simulated))

    def _try_strategy(self, strategy: Strategy) -> Simulation | None:
        is_possible = strategy.devices <= self._original.profile.devices and len(self._simulated) < MOST
        if strategy not in self._tried and is_possible:
            try:
                self._tried[strategy] = self._simulate(strategy)
            except DistIRError:
                self._tried[strategy] = None
        return self._tried.get(strategy)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes of a strategy, for a program with `batch` samples, if known."""

    training: bool
    batch: int | None
    microbatches_help: bool = True

    def single(self, strategy: Strategy) -> list[list[Strategy]]:
        """Return the ladders of one change each, those of least time cost first."""
        return [[strategy.replace(**{name: value}) for value in ladder.values] for name, ladder in self._all(strategy)]

    def several(self, strategy: Strategy) -> list[list[Strategy]]:
        """Return the ladders of several changes, of other splits, and of more devices."""
        grown = [
            [strategy.replace(data=strategy.data * n), strategy.replace(tensor=strategy.tensor * n)] for n in (2, 4)
        ]
        ladders = [[combined] for combined in self._combined(strategy)]
        ladders += [[split, self._strongest(split)] for split in _other_splits(strategy)]
        # Along data if there are enough samples: ZeRO has more ranks then.
        ladders += [[*more, self._strongest(next(filter(self._has_samples, more)))] for more in grown]
        return [[strategy for strategy in ladder if self._has_samples(strategy)] for ladder in ladders]

    def more_microbatches(self, strategy: Strategy) -> list[Strategy]:
        """Return strategies of more microbatches, up to the batch size."""
        more = [strategy.replace(microbatches=strategy.microbatches * factor) for factor in _MICROBATCH_FACTORS]
        return [strategy for strategy in more if self._has_samples(strategy)]

    def _all(self, strategy: Strategy) -> list[tuple[str, Ladder]]:
        """Return the ladders of the options, and that of microbatches, by cost."""
        counts = tuple(s.microbatches for s in self.more_microbatches(strategy))
        ladders = [("microbatches", Ladder(_MICROBATCH_COST, counts))]
        ladders += [(n, ladder) for n, o in OPTIONS.items() for ladder in o.ladders(strategy, self.training)]
        return sorted((pair for pair in ladders if pair[1].values), key=lambda pair: pair[1].cost)

    def _combined(self, strategy: Strategy) -> list[Strategy]:
        """Return several changes at once, each to the last rung of its ladder.

        First the cheapest with each other one, then all of them, then all of them with the expensive ones.
        """
        ladders = [pair for pair in self._all(strategy) if self.microbatches_help or pair[0] != "microbatches"]
        changes = [(name, ladder.values[-1], ladder.cost >= Ladder.EXPENSIVE) for name, ladder in ladders]
        cheap = [(name, value) for name, value, is_expensive in changes if not is_expensive]
        expensive = [(name, value) for name, value, is_expensive in changes if is_expensive]
        sets = [dict([cheap[0], other]) for other in cheap[1:]]
        sets += [dict([*cheap, *expensive[:count]]) for count in range(len(expensive) + 1)]
        return [strategy.replace(**chosen) for chosen in sets]

    def _strongest(self, strategy: Strategy) -> Strategy:
        return self._combined(strategy)[-1]

    def _has_samples(self, strategy: Strategy) -> bool:
        """Return whether there is a sample for each microbatch of each data-parallel rank."""
        return self.batch is None or strategy.data * strategy.microbatches <= self.batch


def _other_splits(strategy: Strategy) -> list[Strategy]:
    """Return the two nearest data and tensor degrees of the same product; more tensor first."""
    ranks = strategy.data * strategy.tensor
    degrees = [t for t in range(1, ranks + 1) if ranks % t == 0 and t != strategy.tensor]
    nearest = sorted(degrees, key=lambda t: (abs(log(t / strategy.tensor)), -t))[:2]
    return [_drop_idle_options(strategy.replace(data=ranks // t, tensor=t)) for t in nearest]


def _drop_idle_options(strategy: Strategy) -> Strategy:
    """Return the strategy without options that make no difference with its degrees."""
    idle = [option for option in OPTIONS.values() if not option.makes_difference(strategy, is_trained=True)]
    return strategy.replace(**{option.name: option.default for option in idle})


def _memory_fraction(simulation: Simulation) -> float:
    """Return the largest fraction of a device's memory that is in use."""
    return float((simulation.peak_memory / simulation.memory).max())
