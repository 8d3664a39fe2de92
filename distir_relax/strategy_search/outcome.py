"""Predicted outcome of a candidate strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from distir_relax.errors import DistIRError
from distir_relax.simulation.simulation import Simulation
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.search_space import Candidate
from distir_relax.support import shown

Lanes = tuple[tuple[str, str], ...]
"""The timeline of a step: for each device class its name, and a line of text."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The predicted step of a strategy.

    `seconds` is its makespan, `memory` the peak in bytes on the device with the largest fraction in use, `fits` whether
    it is within the memory of that device. `bubble` and `communication` are the fractions of the devices' time in which
    they idle, or communicate without compute. `refused` is the reason why there is no prediction.
    """

    strategy: str
    samples: int
    seconds: float = 0.0
    memory: int = 0
    fits: bool = False
    bubble: float = 0.0
    communication: float = 0.0
    refused: str = ""
    lanes: Lanes = field(default=(), compare=False, repr=False)
    """Its timeline, if requested: names of devices, and their lines (`compact_timeline`)."""

    @staticmethod
    def of(candidate: Candidate, result: Simulation, lanes: Lanes = ()) -> Outcome:
        """Return the outcome of a simulation."""
        return Outcome(
            str(candidate.strategy), candidate.samples, result.makespan, int(result.peak_memory[result.fullest]),
            result.fits, result.bubble, result.communication, lanes=lanes,
        )  # fmt: skip

    @property
    def throughput(self) -> float:
        """Return samples per second; 0 without a prediction."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def candidate(self) -> Candidate:
        """Return the candidate."""
        return Candidate(Strategy.parse(self.strategy), self.samples)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object, without the timeline."""
        row = asdict(self)
        del row["lanes"]
        return {**row, "throughput": self.throughput}

    def as_row(self) -> dict[str, Any]:
        """Return a JSON object with the timeline, if it has one; `from_row` reads it."""
        return {**self.as_json(), **({"lanes": self.lanes} if self.lanes else {})}

    @staticmethod
    def from_row(row: Mapping[str, Any], where: str = "") -> Outcome:
        """Return the inverse of `as_row`. Raises `DistIRError` for other rows."""
        types: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
        simple = [item for item in fields(Outcome) if item.name != "lanes"]
        values = {item.name: row.get(item.name) for item in simple}
        for item in simple:
            value = values[item.name]
            # `bool` is a subclass of `int`.
            if not isinstance(value, types[str(item.type)]) or isinstance(value, bool) != (item.type == "bool"):
                raise DistIRError(f"expected {item.type} for {item.name}, found {value!r}", where)
        outcome = Outcome(**values, lanes=_lanes(row.get("lanes", []), where))  # type: ignore[arg-type]
        if min(outcome.samples, outcome.memory + 1) < 1 or outcome.seconds < 0:
            raise DistIRError("expected the outcome of a step, found numbers out of range", where)
        Strategy.parse(outcome.strategy)
        return outcome


def _lanes(lanes: object, where: str) -> Lanes:
    if not isinstance(lanes, list) or not all(
        isinstance(lane, list) and list(map(type, lane)) == [str, str] for lane in lanes
    ):
        raise DistIRError(f"expected a timeline as pairs of texts, found {shown(lanes)}", where)
    return tuple((name, text) for name, text in lanes)
