"""Sums of the gradients of parameters in the dtype of these."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Function, Module, Op, producers
from distir_relax.ops import Trait, lookup
from distir_relax.ops.elementwise.casts import LINEAR


@dataclass(frozen=True, slots=True)
class LinearCasts:
    """Pass: global stage in and out. Casts that widen gradients of parameters count as linear, also in functions.

    Sums over microbatches and ranks then add up their results, in float32: where many gradients of bfloat16 are added
    to a sum of this dtype, the small ones vanish. It runs after `Differentiate`.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    def run(self, module: Module) -> Module:
        """Mark the casts."""
        functions = {f.name: f for f in module.functions}
        producers_of = {f.name: producers(f) for f in module.functions}
        marked: defaultdict[str, set[str]] = defaultdict(set)
        seen: set[tuple[str, str]] = set()
        gradients = [output.value.name for output in module.main.gradients.values()]
        worklist = [(module.main.name, name) for name in gradients]
        while worklist:
            place = function, name = worklist.pop()
            op = producers_of[function].get(name)
            if op is None or place in seen:
                continue
            seen.add(place)
            if op.callee:
                number = next(i for i, v in enumerate(op.results) if v.name == name)
                worklist.append((op.callee, functions[op.callee].outputs[number].value.name))
            elif _widens(op):
                marked[function].add(name)
            else:
                sets = lookup(op.name, op.location).linear_sets(len(op.operands), op.attrs)
                worklist += [(function, op.operands[i].name) for group in sets if len(group) > 1 for i in group]
        return replace(module, functions=tuple(_mark(f, marked[f.name]) for f in module.functions))


def _widens(op: Op) -> bool:
    """Return whether an op casts a float to one of more bits."""
    if Trait.POINTWISE not in lookup(op.name, op.location).traits or len(op.operands) != 1:
        return False
    before, after = op.operands[0].tensor, op.results[0].tensor
    return "float" in before.dtype and "float" in after.dtype and before.bytes < after.bytes


def _mark(function: Function, names: set[str]) -> Function:
    ops = (replace(op, attrs={**op.attrs, LINEAR: True}) if op.results[0].name in names else op for op in function.ops)
    return replace(function, ops=tuple(ops)) if names else function
