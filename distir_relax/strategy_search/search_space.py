"""Search space: the candidate strategies for a number of devices and batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import OPTIONS, Strategy, search_values

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, and the number of samples in a step."""

    strategy: Strategy
    samples: int

    def __str__(self) -> str:
        return f"{self.strategy} with {self.samples} samples"

    @property
    def microbatch(self) -> int:
        """Return the samples of the largest microbatch, over all data-parallel ranks."""
        return -(-self.samples // self.strategy.microbatches)


@dataclass(frozen=True, slots=True, init=False)
class Space:
    """All strategies on `devices` devices for steps of `batches` samples.

    D x T x P are all factorizations of `devices`. A pipeline has each number of `microbatches` except 1; without a
    pipeline there is one microbatch or, if the model is `trained`, each of these numbers. Every microbatch has at least
    a sample for each data-parallel rank. The other arguments are lists of values by the search names of strategy
    options (`StrategyOption`): they are tried where they make a difference. With ``auto`` in `placements` the stages
    are also sharded by optimization, on meshes of D by T devices: then 1 by n is n by 1.

    Raises `DistIRError` for a name that no option has, for numbers below 1, and for invalid values.
    """

    devices: int
    batches: tuple[int, ...]
    trained: bool
    microbatches: tuple[int, ...]
    values: Mapping[str, tuple[Any, ...]]
    """The values of each option, by its name."""

    def __init__(
        self,
        devices: int,
        batches: Sequence[int],
        trained: bool = False,
        microbatches: Sequence[int] = POWERS,
        **values: Sequence[Any],
    ) -> None:
        for name, value in (("devices", devices), ("batches", tuple(batches)), ("trained", trained),
                            ("microbatches", tuple(microbatches)), ("values", search_values(values))):  # fmt: skip
            object.__setattr__(self, name, value)
        if min(devices, *batches, *microbatches) < 1:
            raise DistIRError("devices, batches and microbatches are at least 1")

    def candidates(self) -> list[Candidate]:
        """Return all candidates in a fixed order; those of similar programs are consecutive."""
        candidates: dict[Candidate, None] = {}
        for degrees in self._degrees():
            for options in chain(self._rule_options(degrees), self._auto_options(degrees)):
                for samples, count in product(self.batches, self._microbatch_counts(degrees[2])):
                    candidate = Candidate(Strategy(*degrees, count, **options), samples)
                    if samples // (degrees[0] * count) >= 1 and candidate.strategy.devices == self.devices:
                        candidates[candidate] = None
        return list(candidates)

    def _degrees(self) -> Iterator[tuple[int, int, int]]:
        """Yield D, T, P for each number of devices that the mesh axes of options leave to them."""
        sizes = [{OPTIONS[name].axis_size(value) for value in values} for name, values in self.values.items()]
        for own in sorted({prod(combination) for combination in product(*sizes)}):
            if self.devices % own == 0:
                yield from degrees_of(self.devices // own)

    def _microbatch_counts(self, pipeline: int) -> Sequence[int]:
        if pipeline == 1:
            return self.microbatches if self.trained else (1,)
        return tuple(count for count in self.microbatches if count > 1) or (1,)

    def _rule_options(self, degrees: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
        """Yield the options of strategies with stages sharded by rules."""
        if "rules" in self.values["placements"]:
            yield from self._options(Strategy(*degrees))

    def _auto_options(self, degrees: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
        """Yield the options of strategies with autosharded stages."""
        data, tensor, pipeline = degrees
        placements = self.values["placements"]
        if "auto" in placements and (tensor > 1 or (data == 1 and "rules" not in placements)):
            for options in self._options(Strategy(1, 1, pipeline)):
                if all(OPTIONS[name].with_autosharding for name in options):
                    yield {**options, "placements": "auto"}

    def _options(self, degrees: Strategy) -> Iterator[dict[str, Any]]:
        """Yield all combinations of the options that make a difference, without defaults."""
        tried = {
            name: self.values[name] if option.makes_difference(degrees, self.trained) else (option.default,)
            for name, option in OPTIONS.items()
            if name != "placements"
        }
        for values in product(*tried.values()):
            options = {name: value for name, value in zip(tried, values, strict=True) if value != OPTIONS[name].default}
            if self._is_valid(degrees, options):
                yield options

    def _is_valid(self, degrees: Strategy, options: Mapping[str, Any]) -> bool:
        """Return whether options can be combined, and are worth trying with these degrees."""
        try:
            strategy = degrees.replace(**options)
        except DistIRError:
            return False
        return all(OPTIONS[name].is_searched(strategy[name], strategy, self.trained) for name in OPTIONS)


def degrees_of(devices: int) -> list[tuple[int, int, int]]:
    """Return all D, T, P whose product is `devices`: 15 for 16."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return [(d, t, devices // (d * t)) for d in divisors for t in divisors if devices // d % t == 0]
