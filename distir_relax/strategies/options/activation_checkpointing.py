"""The option ``checkpoint``: recompute activations in the backward (activation checkpointing).

It selects the values that `autodiff.Differentiate` saves for the backward; the memory saved is that of the simulated
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.strategies.strategy import Ladder, StrategyOption

if TYPE_CHECKING:
    from distir_relax.strategies.strategy import Strategy

_BY_MEMORY = ("none", "selective", "block")


class Checkpoint(StrategyOption[str]):
    """The activations that are recomputed: ``none``, those of a ``block``, or the cheap ones (``selective``)."""

    name = "checkpoint"
    default = "none"
    help = "Activation checkpointing."
    metavar = "none,block"
    choices = ("none", "block", "selective")

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there is a backward."""
        return is_trained

    def ladders(self, strategy: Strategy, is_trained: bool) -> Sequence[Ladder]:
        """Return modes that recompute more."""
        stronger = _BY_MEMORY[_BY_MEMORY.index(self.of(strategy)) + 1 :]
        return (Ladder(2.0, stronger if is_trained else ()),)
