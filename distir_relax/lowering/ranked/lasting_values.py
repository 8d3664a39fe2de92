"""Values of a program that are computed once, when it is loaded or for a choice of sizes, and those that change."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from distir_relax.ir import Function, Module, Op, callees_first
from distir_relax.ir.symbols import op_symbols
from distir_relax.layout import Symbol, symbols_within
from distir_relax.ops import Trait, lookup


def fixed_values(function: Function, fixed: set[str]) -> set[str]:
    """Return the values that depend only on `fixed` inputs, including those: they are computed once."""
    constant = set(fixed)
    for op in function.ops:
        if op.callee or any(v.name not in constant for v in op.operands):
            continue
        if Trait.ON_COMMUNICATOR not in lookup(op.name, op.location).traits and not symbols_in_code(op):
            constant.update(v.name for v in op.results)
    return constant


def mutated_values(module: Module) -> dict[str, set[str]]:
    """Return the values that each function or its callees update in place, and the producers' operands of those."""
    found: dict[str, set[str]] = {}
    for function in callees_first(module):
        found[function.name] = _mutated_in(module, function, found)
    return found


def _mutated_in(module: Module, function: Function, of_callees: Mapping[str, Collection[str]]) -> set[str]:
    mutated: set[str] = set()
    for op in function.ops:
        if op.callee:
            inputs = (i.value.name for i in module.function(op.callee).inputs)
            pairs = zip(inputs, op.operands, strict=True)
            mutated.update(operand.name for name, operand in pairs if name in of_callees[op.callee])
        elif lookup(op.name).updates:
            mutated.add(op.operands[0].name)
    # If the updated value is a padded weight, the weight gets its new value too.
    for op in reversed(function.ops):
        if any(v.name in mutated for v in op.results):
            mutated.update(v.name for v in op.operands)
    return mutated


def sized_values(function: Function, fixed: Collection[str], mutated: Collection[str] = ()) -> set[str]:
    """Return the values that depend on sizes and `fixed` values only, without communication, and are not `mutated`."""
    sized: set[str] = set()
    for op in function.ops:
        names = {v.name for v in op.results}
        if op.callee or not names.isdisjoint(fixed) or not names.isdisjoint(mutated):
            continue
        is_local = Trait.COMMUNICATES not in lookup(op.name, op.location).traits
        if is_local and all(v.name in fixed or v.name in sized for v in op.operands):
            sized |= names
    return sized


def symbols_in_code(op: Op) -> frozenset[Symbol]:
    """Return the symbols that the code of an op reads: those of its attributes, and of types that may be empty."""
    if not op.callee and Trait.ZERO_IF_EMPTY in lookup(op.name, op.location).traits:
        return op_symbols(op)
    return symbols_within(tuple(op.attrs.values()))
