"""The option ``zero``: shard replicated training state over the data-parallel ranks.

Its passes are in `strategies.zero`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distir_relax.strategies.strategy import Ladder, PassPoint, StrategyOption

if TYPE_CHECKING:
    from distir_relax.ir import Pass
    from distir_relax.strategies.strategy import Strategy
    from distir_relax.strategies.weight_memory import WeightMemory


class Zero(StrategyOption[int]):
    """The ZeRO stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too."""

    name = "zero"
    default = 0
    help = "ZeRO stages."
    metavar = "0,1,2"
    choices = (0, 1, 2, 3)
    with_autosharding = False

    def passes(self, strategy: Strategy, point: PassPoint, is_trained: bool) -> Sequence[Pass]:
        """Return the passes that shard parameters and gradients, and gather parameters for their use.

        In stage 1 gradients are sharded after all microbatches, otherwise after each.
        """
        from distir_relax.strategies.zero import GatherParameters, ShardGradients, ShardParameters

        stage = self.of(strategy)
        if not stage:
            return ()
        if point is PassPoint.ANNOTATED:
            return (ShardParameters(strategy),)
        if point is PassPoint.GRADIENTS:
            return (ShardGradients(strategy),) if stage > 1 else ()
        gradients = (ShardGradients(strategy),) if stage == 1 and is_trained else ()
        return (*gradients, GatherParameters(strategy))

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there are several data-parallel ranks, and state to shard."""
        return strategy.data > 1 and is_trained

    def search_rank(self, value: int, values: object) -> int:
        """Return the stage: the least communication first."""
        return value

    def are_neighbors(self, value: int, other: int) -> bool:
        """Return whether two stages are consecutive."""
        return abs(value - other) == 1

    def memory(self, strategy: Strategy, memory: WeightMemory) -> WeightMemory:
        """Return the memory divided by the data-parallel ranks: state, then gradients, then weights in use."""
        stage, part = self.of(strategy), 1.0 / strategy.data
        if not stage:
            return memory
        return replace(
            memory,
            stored=memory.stored * part,
            gathered=memory.stored * (1.0 - part) if stage < 3 else 0.0,
            gradients=memory.gradients * (part if stage > 1 else 1.0),
            state=memory.state * part,
        )

    def ladders(self, strategy: Strategy, is_trained: bool) -> Sequence[Ladder]:
        """Return higher stages; stage 3 costs most, since parameters are gathered for each use."""
        if strategy.data == 1:
            return ()
        sharded_state = tuple(stage for stage in (1, 2) if stage > self.of(strategy) and is_trained)
        last = (3,) if self.of(strategy) < 3 else ()
        return (Ladder(0.0, sharded_state), Ladder(Ladder.EXPENSIVE, last))
