"""What a candidate is predicted to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from distir_relax.analysis.simulation import Simulation
from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.search_space import Candidate
from distir_relax.support import shown

Lanes = tuple[tuple[str, str], ...]
"""The time line of a step: for each class of devices its name, and a line of text."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step under a strategy, as predicted.

    `seconds` is its makespan, `memory` the peak in bytes on the device of whose memory it is the largest part, `fits`
    whether it is no more than that device has. `bubble` and `communication` are shares of the devices' time in which
    they wait, or communicate and do nothing else. `refused` says why there is no prediction, where there is none.
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
    """Its time line, where it is asked for: names of devices, and what they do (`report.strip`)."""

    @staticmethod
    def of(candidate: Candidate, found: Simulation, lanes: Lanes = ()) -> Outcome:
        """What a simulation found."""
        return Outcome(
            str(candidate.strategy), candidate.samples, found.makespan, int(found.peak_memory[found.fullest]),
            found.fits, found.bubble, found.communication, lanes=lanes,
        )  # fmt: skip

    @property
    def throughput(self) -> float:
        """Samples a second; 0 where there is no prediction."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def candidate(self) -> Candidate:
        """What was tried."""
        return Candidate(Strategy.parse(self.strategy), self.samples)

    def as_json(self) -> dict[str, Any]:
        """For machines, without time line."""
        found = asdict(self)
        del found["lanes"]
        return {**found, "throughput": self.throughput}

    def as_row(self) -> dict[str, Any]:
        """With its time line, where it has one; `from_row` reads it."""
        return {**self.as_json(), **({"lanes": self.lanes} if self.lanes else {})}

    @staticmethod
    def from_row(row: Mapping[str, Any], where: str = "") -> Outcome:
        """The inverse of `as_row`. Raises `DistIRError` for other rows."""
        kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
        simple = [item for item in fields(Outcome) if item.name != "lanes"]
        given = {item.name: row.get(item.name) for item in simple}
        for item in simple:
            value = given[item.name]
            # A truth value is a whole number in Python.
            if not isinstance(value, kinds[str(item.type)]) or isinstance(value, bool) != (item.type == "bool"):
                raise DistIRError(f"expected {item.type} for {item.name}, found {value!r}", where)
        found = Outcome(**given, lanes=_lanes(row.get("lanes", []), where))  # type: ignore[arg-type]
        if min(found.samples, found.memory + 1) < 1 or found.seconds < 0:
            raise DistIRError("expected the outcome of a step, found numbers that none has", where)
        Strategy.parse(found.strategy)
        return found


def _lanes(found: object, where: str) -> Lanes:
    if not isinstance(found, list) or not all(
        isinstance(lane, list) and list(map(type, lane)) == [str, str] for lane in found
    ):
        raise DistIRError(f"expected a time line as pairs of texts, found {shown(found)}", where)
    return tuple((name, text) for name, text in found)
