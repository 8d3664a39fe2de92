"""Sequence parallelism: split the activations between blocks along the sequence, over the tensor axis.

With tensor parallelism alone, activations are replicated; here each device has its part of the positions. The
all-reduce after a block's products becomes a reduce-scatter, with an all-gather before the next (Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import DistIRError
from distir_relax.ir import (
    PLACEMENTS,
    Attribute,
    BatchDim,
    Function,
    Module,
    Op,
    Value,
    fresh_name,
    inlined_main,
    value_names,
)
from distir_relax.layout import Placement, R, Shard
from distir_relax.sharding.factors import Slot
from distir_relax.strategies.factor_costs import Classes, classes_with_weights
from distir_relax.strategies.strategy import Strategy

SEQUENCE_ROUND = 2
"""The propagation round of annotations along the sequence: after those of heads and hidden dims."""


@dataclass(frozen=True, slots=True)
class SplitSequence:
    """Pass within the global stage: annotate the values between blocks, and their gradients.

    It runs after `ApplyStrategy`, whose records name the dims of samples. Raises `DistIRError` for a model without
    repeated blocks that pass on a sequence.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """Return the module with annotations."""
        classes, names = classes_with_weights(module), inlined_main(module).instance.names
        batch = [record for record in module.records if isinstance(record, BatchDim)]
        samples = {classes.of(record.value, record.dim) for record in batch}
        inputs = {item.value.name for item in module.main.inputs}
        placements: dict[str, tuple[Placement, ...]] = {}
        for op in module.main.ops:
            for value in (*op.operands, *op.results) if op.callee else ():
                if value.name not in inputs and (found := self._placements(names[value.name], value, classes, samples)):
                    placements[value.name] = found
        if not placements:
            raise DistIRError(
                "the model has no repeated blocks that pass on a sequence",
                f"strategy {self.strategy}",
                "remove sequence_parallel",
            )
        return replace(module, functions=(self._annotate(module, placements), *module.functions[1:]))

    def _placements(
        self, name: str, value: Value, classes: Classes, samples: Set[Slot | None]
    ) -> tuple[Placement, ...]:
        """Return placements if a value has samples, sequence and width (the dim of most parameters), else nothing.

        Annotated weights are no inputs of the program either; only activations have samples.
        """
        shape = value.tensor.shape
        owners = [classes.of(name, dim) for dim in range(len(shape))]
        weights = [0.0 if o is None else classes.weights.get(o, 0.0) for o in owners]
        width = max(range(len(shape)), key=weights.__getitem__, default=0)
        candidates = [d for d, o in enumerate(owners) if o is not None and o not in samples and d != width]
        sample_dim = next((d for d, o in enumerate(owners) if o is not None and o in samples), None)
        if "float" not in value.tensor.dtype or sample_dim is None or not candidates or not weights[width]:
            return ()
        data = Shard(sample_dim) if self.strategy.data > 1 else R
        return self.strategy.layout(data, Shard(candidates[0]))

    def _annotate(self, module: Module, placements: dict[str, tuple[Placement, ...]]) -> Function:
        main = module.main
        names = value_names(main)
        annotated: dict[str, Value] = {}
        ops: list[Op] = []
        for op in main.ops:
            ops.append(replace(op, operands=tuple(annotated.get(v.name, v) for v in op.operands)))
            for value in op.results:
                if value.name in placements:
                    result = annotated[value.name] = Value(fresh_name(f"{value.name}.sequence", names), value.type)
                    attrs: dict[str, Attribute] = {
                        PLACEMENTS: placements[value.name],
                        "round": SEQUENCE_ROUND,
                        "both": True,
                    }
                    ops.append(Op("annotate_sharding", (value,), (result,), attrs, f"strategy {self.strategy}"))
        outputs = tuple(replace(o, value=annotated.get(o.value.name, o.value)) for o in main.outputs)
        return replace(main, ops=tuple(ops), outputs=outputs)
