"""ZeRO: shard replicated state over the data-parallel ranks (Rajbhandari et al., ZeRO, 2020).

=====  ====================================================================================================
stage  along the data axis
=====  ====================================================================================================
1      the optimizer's state is sharded, and so are parameters between steps: they are gathered at the first
       use in a step
2      gradients too: each is reduce-scattered as soon as it is computed, microbatch by microbatch
3      parameters too: they are gathered for each use, and again for the backward
=====  ====================================================================================================

The smallest parameters, biases and norms, stay replicated: their collectives would take longer to start than to run.
Those of all of them together are at most 1/`_SMALL` of a rank's shards.

The passes only add and change annotations; propagation derives all-gathers and reduce-scatters from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import (
    GRADIENT_ROLE,
    Module,
    Op,
    Output,
    TensorType,
    Value,
    fresh_name,
    value_names,
)
from distir_relax.layout import Placement, R, Shard
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.factors import is_annotation
from distir_relax.sharding.named_annotations import Mark, change_annotations
from distir_relax.strategies.apply import STRATEGY_ROUND
from distir_relax.strategies.expert_parallel import experts_of
from distir_relax.strategies.strategy import Strategy

GRADIENT_ROUND = 2
"""Gradients propagate after the batch: in its round, the columns of a weight's gradient would split activations."""
_SMALL = 64


@dataclass(frozen=True, slots=True)
class ShardParameters:
    """Pass within the global stage: shard the annotated parameters that are replicated along the data axis.

    It changes the annotations of `ApplyStrategy`; those of the user take precedence.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """Return the module with the changed annotations."""
        sharded = _large_parameters(module, self.strategy.data)

        def shard(value: Value, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
            data, tensor, *others = placements
            if value.name not in sharded or data != R:
                return placements
            other = tensor.dim if isinstance(tensor, Shard) else None
            return _data_placement(value.tensor, other, self.strategy.data), tensor, *others

        main = change_annotations(module.main, f"strategy {self.strategy}", shard)
        return replace(module, functions=(main, *module.functions[1:]))


@dataclass(frozen=True, slots=True)
class ShardGradients:
    """Pass within the global stage: annotate the outputs ``NAME.grad`` of annotated parameters.

    In stage 1 a gradient is replicated, in 2 and 3 it has the layout of its parameter. Without an annotation, that of a
    replicated bias would be split as that of the matrix next to it.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """Return the module with annotations on its gradients."""
        main = module.main
        layouts = _annotated_layouts(module)
        names = value_names(main)
        ops, outputs = list(main.ops), list[Output]()
        for output in main.outputs:
            placements = layouts.get(output.of) if output.role == GRADIENT_ROLE else None
            if placements is not None:
                data = R if self.strategy.zero == 1 else placements[0]
                annotated = Value(fresh_name(f"{output.value.name}.part", names), output.value.type)
                annotation = _annotation(self.strategy, (data, *placements[1:]), GRADIENT_ROUND)
                ops.append(annotation.op(output.value, annotated))
                output = replace(output, value=annotated)
            outputs.append(output)
        annotated_main = replace(main, ops=tuple(ops), outputs=tuple(outputs))
        return replace(module, functions=(annotated_main, *module.functions[1:]))


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """Pass within the global stage: gather sharded parameters where they are used.

    In stages 1 and 2 once, before the first use; in stage 3 before each, so that none is stored for a later use. An
    elementwise op of a parameter alone, such as the cast of a master weight, is computed on the shards, and its result
    is gathered: half the bytes, and no full weight to store in stage 3.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"
    strategy: Strategy

    def run(self, module: Module) -> Module:
        """Return the module with annotations before the ops that use parameters."""
        main = module.main
        layouts = _layouts(module)
        sharded = {op.results[0].name: layouts[op.operands[0].name] for op in main.ops if _annotates(op, layouts)}
        names = value_names(main)
        gathered: dict[str, Value] = {}
        ops: list[Op] = []
        for op in main.ops:
            if self.strategy.zero == 3:
                gathered = {}
            if _is_computed_on_shards(op, sharded):
                result, placements = op.results[0], sharded[op.operands[0].name]
                local = Value(fresh_name(f"{result.name}.part", names), result.type)
                ops += [replace(op, results=(local,)), _annotation(self.strategy, placements).op(local, result)]
                sharded[result.name] = placements
                continue
            for value in op.operands:
                if value.name in sharded and value.name not in gathered:
                    full = Value(fresh_name(f"{value.name}.whole", names), value.type)
                    annotation = _annotation(self.strategy, (R, *sharded[value.name][1:]))
                    ops.append(replace(annotation.op(value, full), location=op.location))
                    gathered[value.name] = full
            ops.append(replace(op, operands=tuple(gathered.get(v.name, v) for v in op.operands)))
        return replace(module, functions=(replace(main, ops=tuple(ops)), *module.functions[1:]))


def _large_parameters(module: Module, ranks: int) -> set[str]:
    """Return the names of the parameters that are worth a collective of their own."""
    sizes = {item.value.name: item.value.tensor.elements for item in module.main.inputs if item.role == "parameter"}
    room = sum(sizes.values()) / (_SMALL * ranks)
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        room -= size
        if room < 0:
            break
        del sizes[name]
    return set(sizes)


def _data_placement(tensor: TensorType, other: int | None, ranks: int) -> Placement:
    """Return the split of a parameter over `ranks`: along its longest dim except `other`, which is split already."""
    dims = [d for d, n in enumerate(tensor.shape) if n > 1]
    candidates = [d for d in dims if d != other] or dims
    return Shard(max(candidates, key=lambda d: (tensor.shape[d], -d))) if candidates and ranks > 1 else R


def _is_computed_on_shards(op: Op, sharded: Mapping[str, tuple[Placement, ...]]) -> bool:
    """Return whether an op maps the elements of one sharded parameter, and to no more bytes."""
    if len(op.operands) != 1 or op.operands[0].name not in sharded or len(op.results) != 1:
        return False
    operand, result = op.operands[0].tensor, op.results[0].tensor
    is_pointwise = Trait.POINTWISE in lookup(op.name, op.location).traits
    return is_pointwise and operand.shape == result.shape and result.bytes <= operand.bytes


def _annotation(strategy: Strategy, placements: tuple[Placement, ...], round_: int = STRATEGY_ROUND) -> Mark:
    return Mark(f"strategy {strategy}", placements, round_)


def _layouts(module: Module) -> dict[str, tuple[Placement, ...]]:
    """Return the annotated layouts of parameters that are sharded along the data axis, without experts."""
    return {name: p for name, p in _annotated_layouts(module).items() if isinstance(p[0], Shard)}


def _annotated_layouts(module: Module) -> dict[str, tuple[Placement, ...]]:
    """Return the annotated layouts of parameters, without experts."""
    main, experts = module.main, experts_of(module)
    parameters = {item.value.name for item in main.inputs if item.role == "parameter"}
    layouts = {
        op.operands[0].name: op.placements for op in main.ops if is_annotation(op) and op.operands[0].name in parameters
    }
    local = {
        name for name, (data, *_) in layouts.items() if name in experts and isinstance(data, Shard) and not data.dim
    }
    return {name: p for name, p in layouts.items() if name not in local}


def _annotates(op: Op, layouts: dict[str, tuple[Placement, ...]]) -> bool:
    return is_annotation(op) and op.operands[0].name in layouts
