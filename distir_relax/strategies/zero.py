"""ZeRO: what is the same on all data-parallel ranks lies in parts on them (Rajbhandari et al., ZeRO, 2020).

=====  ====================================================================================================
stage  along the data axis
=====  ====================================================================================================
1      the optimizer's state lies in parts, and so do parameters between steps: they are gathered when a step
       first uses them
2      gradients, too: as soon as there is one it is reduced into parts, microbatch by microbatch
3      parameters, too: they are gathered for each use, and again for the backward
=====  ====================================================================================================

All of it is marks; propagation makes all-gathers and reduce-scatters of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Module, Op, Output, TensorType, Value, fresh_name, value_names
from distir_relax.layout import Placement, R, Shard, print_placements
from distir_relax.layout.placement import parse_placements
from distir_relax.sharding.factors import is_annotation
from distir_relax.sharding.named_annotations import Mark
from distir_relax.strategies.expert_parallel import experts_of
from distir_relax.strategies.strategy import Strategy

GRADIENT = ".grad"


@dataclass(frozen=True, slots=True)
class ShardGradients:
    """The pass: global stage in and out, with marks on the outputs ``NAME.grad`` of parameters in parts.

    In stage 1 a gradient is whole, in 2 and 3 it lies as its parameter does.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """The module with marks behind its gradients."""
        main = module.main
        lies = _layouts(module)
        taken = value_names(main)
        ops, outputs = list(main.ops), list[Output]()
        for output in main.outputs:
            placements = lies.get(output.name.removesuffix(GRADIENT)) if output.name.endswith(GRADIENT) else None
            if placements is not None:
                data = R if self.strategy.zero == 1 else placements[0]
                marked = Value(fresh_name(f"{output.value.name}.part", taken), output.value.type)
                ops.append(_mark(self.strategy, (data, placements[1])).op(output.value, marked))
                output = replace(output, value=marked)
            outputs.append(output)
        new = replace(main, ops=tuple(ops), outputs=tuple(outputs))
        return replace(module, functions=(new, *module.functions[1:]))


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """The pass: global stage in and out; parameters in parts are gathered where they are used.

    In stages 1 and 2 once, before the first use; in stage 3 before each, so that no use keeps one for another.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """The module with marks before the ops that use parameters."""
        main = module.main
        lies = _layouts(module)
        parts = {op.results[0].name: lies[op.operands[0].name] for op in main.ops if _is_of(op, lies)}
        taken = value_names(main)
        whole: dict[str, Value] = {}
        ops: list[Op] = []
        for op in main.ops:
            if self.strategy.zero == 3:
                whole = {}
            for value in op.operands:
                if value.name in parts and value.name not in whole:
                    gathered = Value(fresh_name(f"{value.name}.whole", taken), value.type)
                    mark = _mark(self.strategy, (R, parts[value.name][1]))
                    ops.append(replace(mark.op(value, gathered), location=op.location))
                    whole[value.name] = gathered
            ops.append(replace(op, operands=tuple(whole.get(v.name, v) for v in op.operands)))
        return replace(module, functions=(replace(main, ops=tuple(ops)), *module.functions[1:]))


def part_of(kind: TensorType, other: int | None, ranks: int) -> Placement:
    """How a parameter lies in parts on `ranks`, beside a split of its dim `other`: along its longest other dim."""
    dims = [d for d, n in enumerate(kind.shape) if n > 1]
    chosen = [d for d in dims if d != other] or dims
    return Shard(max(chosen, key=lambda d: (kind.shape[d], -d))) if chosen and ranks > 1 else R


def _mark(strategy: Strategy, placements: tuple[Placement, ...]) -> Mark:
    return Mark(f"strategy {strategy}", print_placements(placements), 1)


def _layouts(module: Module) -> dict[str, tuple[Placement, ...]]:
    """How the parameters are marked that lie in parts along the data axis; each expert is whole where it is."""
    main, experts = module.main, experts_of(module)
    parameters = {item.value.name for item in main.inputs if item.role == "parameter"}
    found = {
        op.operands[0].name: parse_placements(str(op.attrs["placements"]))
        for op in main.ops
        if is_annotation(op) and op.operands[0].name in parameters
    }
    whole = {name for name, (data, *_) in found.items() if name in experts and isinstance(data, Shard) and not data.dim}
    return {name: p for name, p in found.items() if isinstance(p[0], Shard) and name not in whole}


def _is_of(op: Op, lies: dict[str, tuple[Placement, ...]]) -> bool:
    return is_annotation(op) and op.operands[0].name in lies
