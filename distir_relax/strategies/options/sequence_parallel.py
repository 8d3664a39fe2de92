"""The option ``sequence_parallel``: split activations between blocks along the sequence, over the tensor axis.

Its pass is in `strategies.sequence_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.strategies.strategy import PassPoint, StrategyOption

if TYPE_CHECKING:
    from distir_relax.ir import Pass
    from distir_relax.strategies.strategy import Strategy


class SequenceParallel(StrategyOption[bool]):
    """Whether activations between blocks are split along the sequence; weights take the same memory."""

    name = "sequence_parallel"
    default = False
    help = "Shard sequences over tensor ranks where nothing else is sharded."
    metavar = "off,on"
    with_autosharding = False

    def needs_batch(self, value: bool) -> bool:
        """Return whether sequences are split: the sequence is the other dim of activations than the batch."""
        return value

    def passes(self, strategy: Strategy, point: PassPoint, is_trained: bool) -> Sequence[Pass]:
        """Return the pass that annotates activations."""
        from distir_relax.strategies.sequence_parallel import SplitSequence

        return (SplitSequence(strategy),) if self.of(strategy) and point is PassPoint.ANNOTATED else ()

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there are several tensor ranks."""
        return strategy.tensor > 1

    def search_rank(self, value: bool, values: object) -> int:
        """Return the place: sequence parallelism first, since it sends as much and computes less twice."""
        return int(not value)
