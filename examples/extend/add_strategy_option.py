"""A strategy option added from outside: embedding tables are sharded by rows over the data-parallel ranks.

Recommenders are trained so (Naumov et al., DLRM, 2019): the small network is data parallel, and each rank has its rows
of the large tables, which it looks up for all samples. One class declares the syntax, the pass, the values that a
search tries, and the effect on memory; searches and all commands take it from then on. Run it, or compile with it::

    python examples/extend/add_strategy_option.py
    distir compile examples/extend/add_strategy_option.py:build --strategy 3/1/1/1,tables=rows -o recommender.dist
    distir search examples/extend/add_strategy_option.py:build --devices 3 --profile dgx2-v100 --try tables=whole,rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

import distir_relax as dr
from distir_relax.ir import Module, Pass, Value, inlined_main
from distir_relax.layout import Placement, R, Shard
from distir_relax.ops import lookup
from distir_relax.sharding.factors import is_annotation
from distir_relax.sharding.named_annotations import change_annotations
from distir_relax.strategies import Strategy, StrategyOption, register_option
from distir_relax.strategies.strategy import Ladder, PassPoint
from distir_relax.strategies.weight_memory import WeightMemory


@dataclass(frozen=True)
class ShardTables:
    """Pass within the global stage: annotate tables ``S[0]`` along the data axis, in place of the strategy's layout."""

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """Return the module with changed annotations. A table is a parameter that an op looks up by indices."""
        annotated = {op.results[0].name: op.operands[0].name for op in module.main.ops if is_annotation(op)}
        tables = {
            annotated[op.operands[0].name]
            for op in inlined_main(module).function.ops
            if op.operands and op.operands[0].name in annotated and 1 in lookup(op.name, op.location).split.indices
        }

        def shard(value: Value, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
            return (Shard(0), R) if value.name in tables else placements

        main = change_annotations(module.main, f"strategy {self.strategy}", shard)
        return replace(module, functions=(main, *module.functions[1:]))


class Tables(StrategyOption[str]):
    """The layout of embedding tables: ``whole`` on each data-parallel rank, or some ``rows`` on each."""

    name = "tables"
    default = "whole"
    help = "Embedding tables on data-parallel ranks."
    metavar = "whole,rows"
    choices = ("whole", "rows")
    with_autosharding = False

    def passes(self, strategy: Strategy, point: PassPoint, is_trained: bool) -> Sequence[Pass]:
        """Return the pass that shards tables, after the strategy's annotations."""
        is_used = self.of(strategy) == "rows" and point is PassPoint.ANNOTATED
        return (ShardTables(strategy),) if is_used else ()

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether there are several data-parallel ranks."""
        return strategy.data > 1

    def memory(self, strategy: Strategy, memory: WeightMemory) -> WeightMemory:
        """Return the least memory: that of a model which is all tables."""
        part = 1.0 / strategy.data if self.of(strategy) == "rows" else 1.0
        return WeightMemory(memory.stored * part, memory.gathered, memory.gradients * part, memory.state * part)

    def ladders(self, strategy: Strategy, is_trained: bool) -> Sequence[Ladder]:
        """Return the layout that needs less memory, to try where a strategy does not fit."""
        return (Ladder(0.5, ("rows",)),) if strategy.data > 1 and self.of(strategy) == "whole" else ()


register_option(Tables())


class Recommender(nn.Module):
    """Two tables, and a small network over their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(127, 8), nn.Embedding(1009, 8)
        self.score = nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.score(torch.cat([self.users(user), self.items(item)], -1))


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return the model and an example, as the commands take them."""
    torch.manual_seed(0)
    return Recommender(), (torch.randint(127, (13,)), torch.randint(1009, (13,)))


def main() -> None:
    model, batch = build()
    plan = dr.compile(model, batch, strategy="3/1/1/1,tables=rows")
    torch.testing.assert_close(plan(*batch), model(*batch).detach())
    ranked = plan.modules["ranked"]
    for rank, name in enumerate(ranked.ranks):
        shapes = {i.value.name: i.value.tensor.shape for i in ranked.function(name).inputs}
        print(f"rank {rank} has {shapes['items.weight'][0]} of 1009 rows of items, and all of the network")
        assert shapes["items.weight"][0] in (336, 337)
        assert shapes["score.0.weight"] == (7, 16)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    training = dr.Training(model, loss, dr.optim.AdamW(lr=1e-3), (batch, torch.randn(13, 1)))
    step = training.compile(strategy="3/1/1/1,tables=rows")
    print(f"a training step's loss is {step(*training.example_batch):.4f}")
    result = dr.search(training, devices=3, profile="dgx2-v100", tables=("whole", "rows"), workers=1)
    assert any("tables=rows" in outcome.strategy for outcome in result.ranked)
    for outcome in result.ranked:
        print(f"{outcome.strategy:24} {outcome.seconds * 1e3:6.2f} ms, {outcome.memory / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
