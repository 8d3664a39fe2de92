"""Values of a program that are computed once, when it is loaded or for a choice of sizes, and those that change."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from distir_relax.ir import Function, Module, Op, RepeatedMicrobatches, callees_first
from distir_relax.ir.symbols import op_symbols
from distir_relax.layout import Symbol, symbols_within
from distir_relax.ops import Trait, lookup


def fixed_values(function: Function, fixed: set[str], excluded: Container[str] = ()) -> set[str]:
    """Return the values that depend only on `fixed` inputs, including those: they are computed once.

    None of them is `excluded`, by the first result of its op.
    """
    constant = set(fixed)
    for op in function.ops:
        if op.callee or any(v.name not in constant for v in op.operands) or op.results[0].name in excluded:
            continue
        if Trait.ON_COMMUNICATOR not in lookup(op.name, op.location).traits and not symbols_in_code(op):
            constant.update(v.name for v in op.results)
    return constant


def entries_of(module: Module) -> set[str]:
    """Return the functions that nothing calls: those of ranks, or the entry function."""
    return set(module.ranks) or {module.main.name}


def kept_values(module: Module) -> dict[str, Mapping[str, int]]:
    """Return the values by function that stay in each call: those of microbatches, which a simulation repeats."""
    repeated = next((record for record in module.records if isinstance(record, RepeatedMicrobatches)), None)
    return {} if repeated is None else {module.main.name: repeated.part_of}


def stored_inputs(module: Module, mutated: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the inputs of each function that are weights in every call; `mutated` is of `mutated_values`."""
    entries, kept = entries_of(module), kept_values(module)
    stored = {
        f.name: {i.value.name for i in f.inputs if f.name not in entries or i.role != "input"} for f in module.functions
    }
    for function in reversed(callees_first(module)):
        fixed = fixed_values(function, stored[function.name] - mutated[function.name], kept.get(function.name, ()))
        for op in function.ops:
            if op.callee:
                inputs = (i.value.name for i in module.function(op.callee).inputs)
                pairs = zip(inputs, op.operands, strict=True)
                stored[op.callee] -= {name for name, operand in pairs if operand.name not in fixed}
    return stored


def computed_once(module: Module) -> dict[str, set[str]]:
    """Return the values of each function that are computed once, when the program is loaded, with its weights."""
    mutated, kept = mutated_values(module), kept_values(module)
    stored = stored_inputs(module, mutated)
    return {f.name: fixed_values(f, stored[f.name] - mutated[f.name], kept.get(f.name, ())) for f in module.functions}


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
