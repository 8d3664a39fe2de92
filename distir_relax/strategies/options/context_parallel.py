"""The options ``context``, which splits sequences over the devices of a mesh axis of their own, ``ring`` and ``rows``.

`strategies.apply` annotates the inputs; the layouts of all other values follow, by `Propagate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.errors import DistIRError
from distir_relax.strategies.strategy import StrategyOption

if TYPE_CHECKING:
    from distir_relax.strategies.strategy import Strategy


class ContextParallel(StrategyOption[int]):
    """The number of devices that share each sequence: keys of attention are gathered, or its parts joined."""

    name = "context"
    default = 1
    help = "Devices that share a sequence."
    metavar = "1,2,4"
    with_autosharding = False

    def check(self, value: int, where: str) -> None:
        """Raise `DistIRError` for less than one device."""
        if value < 1:
            raise DistIRError(f"context is at least 1, found {value}", where)

    def axis_size(self, value: int) -> int:
        """Return the number of devices."""
        return value

    def needs_batch(self, value: int) -> bool:
        """Return whether sequences are split: the sequence is another dim of inputs than the batch."""
        return value > 1

    def search_rank(self, value: int, values: object) -> int:
        """Return the degree: samples are split first, which needs no communication in the forward."""
        return value


class Ring(StrategyOption[str]):
    """Whether devices that share sequences exchange keys and values one after the other, while they compute."""

    name = "ring"
    default = "auto"
    help = "Exchange keys of a split sequence in turns: where it costs less, wherever it is possible, or never."
    metavar = "auto,on,off"
    choices = ("auto", "on", "off")
    with_autosharding = False

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether sequences are split."""
        return bool(strategy["context"] > 1)


class SplitRows(StrategyOption[str]):
    """Whether devices that share sequences share their rows, too, or the states alone."""

    name = "rows"
    default = "split"
    help = "Split the rows of a sequence, or leave them whole and split states alone, as for many requests at once."
    metavar = "split,whole"
    choices = ("split", "whole")
    with_autosharding = False

    def check_combination(self, strategy: Strategy) -> None:
        """Raise `DistIRError` for whole rows without devices that share the states."""
        if strategy[self.name] == "whole" and strategy["context"] == 1:
            raise DistIRError("expected context of at least 2 for rows=whole", f"strategy {strategy}")

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there are states that devices share: those of programs that continue sequences."""
        return bool(strategy["context"] > 1) and not is_trained
