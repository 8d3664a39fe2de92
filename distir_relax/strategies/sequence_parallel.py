"""Sequence parallelism: activations between blocks lie split along the sequence over the tensor axis.

Where tensor parallelism alone keeps them whole on every device, each keeps its part of the positions; in place of the
all-reduce behind a block's products there is a reduce-scatter, and an all-gather before the next (Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import Attribute, BatchDim, Function, Module, Op, Value, fresh_name, value_names, whole_of
from distir_relax.layout import Placement, R, Shard, print_placements
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes, classes_with_weights
from distir_relax.strategies.strategy import Strategy

SEQUENCE_ROUND = 2
"""The round in which marks along the sequence spread: heads and hidden dims come first."""


@dataclass(frozen=True, slots=True)
class SplitSequence:
    """The pass: global stage in and out, with marks on what blocks take from each other, and on its gradients.

    It stands behind `ApplyStrategy`, whose records say where the samples are. Raises `DistIRError` for a model without
    repeated blocks that pass on a sequence.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """The module with marks."""
        classes, names = classes_with_weights(module), whole_of(module).instance.names
        batch = [record for record in module.records if isinstance(record, BatchDim)]
        samples = {classes.of(record.value, record.dim) for record in batch}
        inputs = {item.value.name for item in module.main.inputs}
        wanted: dict[str, str] = {}
        for op in module.main.ops:
            for value in (*op.operands, *op.results) if op.callee else ():
                if value.name not in inputs and (text := self._mark(names[value.name], value, classes, samples)):
                    wanted[value.name] = text
        if not wanted:
            raise DistIRError(
                "the model has no repeated blocks that pass on a sequence, to split between them",
                f"strategy {self.strategy}",
                "leave sequence_parallel out",
            )
        return replace(module, functions=(self._marked(module, wanted), *module.functions[1:]))

    def _mark(self, name: str, value: Value, classes: Classes, samples: Set[Slot | None]) -> str:
        """How a value lies that has a sequence beside samples and width (the dim of most parameters), or nothing."""
        shape = value.tensor.shape
        owners = [classes.of(name, dim) for dim in range(len(shape))]
        held = [0.0 if o is None else classes.weights.get(o, 0.0) for o in owners]
        width = max(range(len(shape)), key=held.__getitem__, default=0)
        free = [d for d, o in enumerate(owners) if o is not None and o not in samples and d != width]
        if "float" not in value.tensor.dtype or not free or not held[width]:
            return ""
        placements: list[Placement] = [R, Shard(free[0])]
        split = next((d for d, o in enumerate(owners) if o is not None and o in samples), None)
        if split is not None and self.strategy.data > 1:
            placements[0] = Shard(split)
        return print_placements(tuple(placements))

    def _marked(self, module: Module, wanted: dict[str, str]) -> Function:
        main = module.main
        taken = value_names(main)
        marked: dict[str, Value] = {}
        ops: list[Op] = []
        for op in main.ops:
            ops.append(replace(op, operands=tuple(marked.get(v.name, v) for v in op.operands)))
            for value in op.results:
                if value.name in wanted:
                    new = marked[value.name] = Value(fresh_name(f"{value.name}.sequence", taken), value.type)
                    attrs: dict[str, Attribute] = {
                        "placements": wanted[value.name],
                        "round": SEQUENCE_ROUND,
                        "both": True,
                    }
                    ops.append(Op("annotate_sharding", (value,), (new,), attrs, f"strategy {self.strategy}"))
        outputs = tuple(replace(o, value=marked.get(o.value.name, o.value)) for o in main.outputs)
        return replace(main, ops=tuple(ops), outputs=outputs)
