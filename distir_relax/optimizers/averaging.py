"""Averages of weights over the steps of a training: `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from distir_relax.bundle import AVERAGED
from distir_relax.errors import DistIRError
from distir_relax.ir import Value
from distir_relax.ops import Builder, cast


class Averaging(ABC):
    """How much of an average is a weight's new value: ``average + share * (weight - average)``."""

    @abstractmethod
    def share(self, g: Builder, step: Value) -> Value:
        """Emit with `g` the share of the new values, a float64 scalar; `step` counts from 1, float64."""


@dataclass(frozen=True, slots=True)
class EMA(Averaging):
    """An exponential moving average, which begins with the weights after the first step.

    Polyak and Juditsky, 1992. Raises `DistIRError` for a decay that is not from 0 to below 1.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise DistIRError(f"expected a decay from 0 to below 1, found {self.decay}", "EMA")

    def share(self, g: Builder, step: Value) -> Value:
        """See `Averaging.share`."""
        one = g.constant(1.0, "float64")
        first = g.emit("less_equal", step, one)
        share: Value = g.emit("where", first, one, g.constant(1 - self.decay, "float64"))
        return share


@dataclass(frozen=True, slots=True)
class SWA(Averaging):
    """The mean of the weights after step `start` and each `every` steps from there, counted from 1.

    Izmailov et al., Averaging Weights Leads to Wider Optima, 2018. Before, the average is the weights. Raises
    `DistIRError` for numbers below 1.
    """

    start: int
    every: int = 1

    def __post_init__(self) -> None:
        for name, number in (("start", self.start), ("every", self.every)):
            if not isinstance(number, int) or number < 1:
                raise DistIRError(f"expected {name} to be a whole number of at least 1, found {number!r}", "SWA")

    def share(self, g: Builder, step: Value) -> Value:
        """See `Averaging.share`."""
        one = g.constant(1.0, "float64")
        passed = g.emit("subtract", step, g.constant(float(self.start), "float64"))
        turn = g.emit("divide", passed, g.constant(float(self.every), "float64"))
        whole = g.emit("floor", turn)
        mean = g.emit("divide", one, g.emit("add", whole, one))
        is_turn = g.emit("equal", turn, whole)
        later = g.emit("where", is_turn, mean, g.constant(0.0, "float64"))
        before = g.emit("less", passed, g.constant(0.0, "float64"))
        share: Value = g.emit("where", before, one, later)
        return share


def add_averages(
    g: Builder, weights: Mapping[str, Value], averaging: Averaging, step: Value
) -> dict[str, tuple[Value, Value]]:
    """Emit new averages of weights by name; return the state and its new value for each."""
    share = averaging.share(g, step)
    shares = {dtype: cast(g, share, dtype) for dtype in {v.tensor.dtype for v in weights.values()}}
    averages: dict[str, tuple[Value, Value]] = {}
    for name, weight in weights.items():
        g.hint = f"{name}{AVERAGED}"
        old = g.input(f"{name}{AVERAGED}", weight.tensor, "state")
        change = g.emit("multiply", g.emit("subtract", weight, old), shares[weight.tensor.dtype])
        averages[f"{name}{AVERAGED}"] = old, g.emit("add", old, change)
    return averages
