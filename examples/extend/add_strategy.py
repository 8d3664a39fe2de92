"""A strategy added from outside: embedding tables are split by rows, and nothing else.

A recommender's tables are most of its weights, and the rest of it is small: here each rank holds its rows of every
table, looks up what it has, and the sum of all is the result. No model is known here, and no op by name. Run me::

    python examples/extend/add_strategy.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

import distir_relax as dr
from distir_relax.ir import Module, Pass, inlined_main
from distir_relax.layout import Shard
from distir_relax.ops import lookup
from distir_relax.sharding.named_annotations import Mark, mark_inputs


@dataclass(frozen=True)
class SplitTables:
    """The pass: global stage in and out, with marks on the parameters that some op looks rows up in."""

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    mesh: dr.DeviceMesh

    def run(self, module: Module) -> Module:
        """What is a table, the entries of the ops that use it say: they have operands that are indices."""
        main = inlined_main(module).function
        parameters = {item.value.name for item in main.inputs if item.role == "parameter"}
        tables = {
            op.operands[0].name
            for op in main.ops
            if op.operands and op.operands[0].name in parameters and 1 in lookup(op.name, op.location).split.indices
        }
        marks = {name: Mark("SplitTables", (Shard(0),)) for name in tables}
        return replace(module, functions=(mark_inputs(module.main, marks), *module.functions[1:]), meshes=(self.mesh,))


class Recommender(nn.Module):
    """Tables of unlike sizes, and a small network over what is found in them."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(127, 8), nn.Embedding(1009, 8)
        self.score = nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.score(torch.cat([self.users(user), self.items(item)], -1))


def main() -> None:
    torch.manual_seed(0)
    model, mesh = Recommender(), dr.DeviceMesh((3,), ("rows",))
    batch = torch.randint(127, (5,)), torch.randint(1009, (5,))

    def split(passes: Sequence[Pass]) -> list[Pass]:
        outline, *rest = passes
        return [outline, SplitTables(mesh), *rest]

    plan = dr.compile(model, batch, passes=split)
    torch.testing.assert_close(plan(*batch), model(*batch).detach())
    print(plan.footprint)
    for rank, name in enumerate(plan.modules["ranked"].ranks):
        held = {i.value.name: i.value.tensor.shape for i in plan.modules["ranked"].function(name).inputs}
        print(f"rank {rank} holds {held['items.weight'][0]} of 1009 rows of items")


if __name__ == "__main__":
    main()
