"""Equal ops of a function become one: positions and masks that every layer computes, once its calls are inlined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Function, Module, Op, Value
from distir_relax.ops import Trait, lookup


@dataclass(frozen=True, slots=True)
class MergeEqual:
    """Pass: ranked or distributed stage, in and out. Calls and ops on the communicator stay, as other ranks wait."""

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Let the first of several ops with equal operands and attributes stand for all, in every function."""
        return replace(module, functions=tuple(map(_merged, module.functions)))


def _merged(function: Function) -> Function:
    names: dict[str, Value] = {}
    found: dict[object, tuple[Value, ...]] = {}
    ops: list[Op] = []
    for op in function.ops:
        operands = tuple(names.get(v.name, v) for v in op.operands)
        key = (op.name, operands, tuple(sorted(op.attrs.items())), tuple(v.type for v in op.results))
        if not _has_effects(op) and key in found:
            names |= {v.name: first for v, first in zip(op.results, found[key], strict=True)}
            continue
        found[key] = op.results
        ops.append(replace(op, operands=operands))
    outputs = tuple(replace(o, value=names.get(o.value.name, o.value)) for o in function.outputs)
    return replace(function, ops=tuple(ops), outputs=outputs)


def _has_effects(op: Op) -> bool:
    if op.callee:
        return True
    entry = lookup(op.name, op.location)
    return Trait.ON_COMMUNICATOR in entry.traits or entry.updates
