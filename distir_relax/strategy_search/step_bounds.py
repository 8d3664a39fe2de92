"""Lower bounds of the time and memory of the steps of a model that is a chain of equal blocks.

A block costs the same wherever it is (`block_costs`), and a pipeline has a least time, whatever its stages
(`pipeline_bounds`). A rank keeps the weights of its blocks, the state of its optimizer, and the activations of the
microbatches in flight: that limits their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.schedules import schedule_named
from distir_relax.schedules.task import Shape
from distir_relax.schedules.task_times import EQUAL
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.block_costs import BlockCosts
from distir_relax.strategy_search.pipeline_bounds import OrderBounds, Pipeline
from distir_relax.strategy_search.search_space import Candidate
from distir_relax.strategy_search.shortened import Chain


@dataclass
class StepBounds:
    """Lower bounds of the steps of a model on a machine; `chain` is the chain of its blocks."""

    chain: Chain
    profile: Profile
    costs: BlockCosts
    _orders: dict[object, OrderBounds] = field(default_factory=dict)

    @staticmethod
    def of(source: Source, profile: Profile, candidates: Sequence[Candidate]) -> StepBounds | None:
        """Return the bounds for training steps.

        None for a model that is no chain of equal blocks, for stages that are named, and on heterogeneous devices.
        """
        is_uniform = not profile.groups and not source.options["stages"]
        if not source.is_training or not is_uniform or (chain := Chain.of(source)) is None:
            return None
        bounded = [candidate for candidate in candidates if _is_bounded(candidate.strategy)]
        return StepBounds(chain, profile, BlockCosts(chain, profile, source.batch or 1, bounded))

    def prepare(self, candidates: Iterable[Candidate], with_data: bool, workers: int) -> None:
        """Compute costs for `seconds` in processes."""
        self.costs.find((c for c in candidates if _is_bounded(c.strategy)), with_data, workers)

    def seconds(self, candidate: Candidate, with_data: bool = False) -> float:
        """Return the least time of a step that fits into memory; infinity if there is none.

        With ZeRO 2 and 3 the bound is higher `with_data`, their traffic in each microbatch, and takes longer. It is 0
        for a step of a single microbatch, which accumulates no gradients, with autosharding, and if a short version of
        the model cannot be compiled.
        """
        s = candidate.strategy
        if not _is_bounded(s):
            return 0.0
        costs, alone = self.costs.seconds(candidate, with_data), self.costs.seconds(candidate)
        if costs is None or alone is None:
            return 0.0
        order, (block, rest) = self._order(s), alone
        pipeline = Pipeline(order, s.microbatches, s.chunks, len(self.chain), rest.middle / block.middle)
        return pipeline.least_seconds(*costs, self._most_blocks(candidate, order))

    def _most_blocks(self, candidate: Candidate, order: OrderBounds) -> list[float]:
        """Return the number of blocks for which each rank has memory."""
        limit = max(memory for _, memory in self.profile.device_specs(candidate.strategy.devices))
        costs, chunks = self.costs, candidate.strategy.chunks
        weights = costs.weight_bytes(candidate.strategy)
        # The largest stage has at least its share of the blocks of its rank.
        of_microbatch = costs.kept_bytes(candidate), costs.held_bytes(candidate) / chunks
        most = []
        for kept, by_one, by_all in zip(order.in_flight, order.by_one, order.by_all, strict=True):
            needed = [
                weights.least(chunks),
                weights.stored + max(map(mul, kept, of_microbatch)),
                weights.by_one(chunks) + max(map(mul, by_one, of_microbatch)),
            ]
            if any(by_all):
                needed.append(sum(weights) + max(map(mul, by_all, of_microbatch)))
            most.append(limit / max(needed))
        return most

    def _order(self, s: Strategy) -> OrderBounds:
        """Return the bounds of the order of a pipeline; of many more ranks than blocks those of any order."""
        if s.pipeline == 1 or not schedule_named(s.schedule).by_shape or s.pipeline > 2 * len(self.chain):
            return OrderBounds.unknown(s.pipeline, s.chunks)
        key = s.schedule, s.pipeline, s.microbatches, s.chunks
        if key not in self._orders:
            # Not checked, which takes longer: it is when a candidate is compiled.
            order = schedule_named(s.schedule).make(Shape(s.pipeline, s.microbatches, s.chunks), EQUAL, None)
            self._orders[key] = OrderBounds.of(order)
        return self._orders[key]


def _is_bounded(strategy: Strategy) -> bool:
    return strategy.microbatches > 1 and strategy.placements == "rules" and not strategy.option_axes
