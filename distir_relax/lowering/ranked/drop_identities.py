"""Ops that give their operand as it is, such as a slice of all rows, are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Function, Module, Op, Value
from distir_relax.ops import lookup


@dataclass(frozen=True, slots=True)
class DropIdentities:
    """Pass: ranked or distributed stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Let users of such an op's result take its operand, in every function."""
        return replace(module, functions=tuple(map(_without_identities, module.functions)))


def _without_identities(function: Function) -> Function:
    names: dict[str, Value] = {}
    ops: list[Op] = []
    for op in function.ops:
        op = replace(op, operands=tuple(names.get(v.name, v) for v in op.operands))
        if not op.callee and lookup(op.name, op.location).is_identity(op.operands, op.results):
            names[op.results[0].name] = op.operands[0]
        else:
            ops.append(op)
    outputs = tuple(replace(o, value=names.get(o.value.name, o.value)) for o in function.outputs)
    return replace(function, ops=tuple(ops), outputs=outputs)
