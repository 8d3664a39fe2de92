"""What a program keeps between calls: weights, packed weights, and what is computed of them when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from distir_relax.cost.profile import Profile
from distir_relax.executable.hoist import PREPARE, Hoist, is_constant
from distir_relax.ir import Function, Module, Value, remap_devices
from distir_relax.ops import Trait, lookup


def as_executed(module: Module, profile: Profile) -> Module:
    """Return a distributed program as its ranks run it: at the executable stage. CPUs pack weights.

    A runtime that does not fold ops on shapes (`Profile.folds`) runs all ops in each call.
    """
    if module.stage == "executable" or not profile.folds:
        return module
    return Hoist(pack=profile.kind == "cpu").run(module)


def weights_of(module: Module, main: Function) -> dict[str, Value]:
    """Return the parameters of an entry function, as they are loaded."""
    prepare = _prepare(module, main)
    inputs = (*main.inputs, *(prepare.inputs if prepare else ()))
    return {item.value.name: item.value for item in inputs if item.role == "parameter"}


def kept_storage(module: Module, main: Function) -> dict[str, Value]:
    """Return the value whose storage each constant of an entry function has: a weight, or a result of its preparation.

    A weight is freed if nothing needs it after that.
    """
    prepare = _prepare(module, main)
    prepared: dict[str, Value] = {}
    if prepare is not None:
        functions = {function.name: function for function in module.functions}
        storage = _storage(prepare, functions, {i.value.name: i.value for i in prepare.inputs})
        prepared = {output.value.name: storage[output.value.name] for output in prepare.outputs}
    return {i.value.name: prepared.get(i.value.name, i.value) for i in main.inputs if is_constant(i)}


def prepared_from(module: Module, main: Function) -> dict[str, tuple[object, ...]]:
    """Return what each packed weight, and each value that calls prepare, is of: the weights, and which result."""
    prepare = _prepare(module, main)
    found: dict[str, tuple[object, ...]] = {}
    for op in prepare.ops if prepare else ():
        results = [o.name for o in module.function(op.callee).outputs] if op.callee else range(len(op.results))
        if op.callee or Trait.PACKS in lookup(op.name, op.location).traits:
            weights = tuple(v.name for v in op.operands)
            found |= {v.name: (weights, result) for v, result in zip(op.results, results, strict=True)}
    return found


def _prepare(module: Module, main: Function) -> Function | None:
    return next((f for f in module.functions if f.name == main.name + PREPARE), None)


def _storage(function: Function, functions: Mapping[str, Function], given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the value whose storage each value of a function has; `given` are those of its inputs."""
    found = dict(given)
    for op in function.ops:
        if not op.callee:
            entry = lookup(op.name, op.location)
            shares = bool(op.operands) and (entry.shares_storage or entry.is_identity(op.operands, op.results))
            found |= {v.name: found[op.operands[0].name] if shares else v for v in op.results}
            continue
        callee = functions[op.callee]
        inputs = zip(callee.inputs, op.operands, strict=True)
        outer = {item.value.name: found[operand.name] for item, operand in inputs}
        inner = _storage(callee, functions, outer)
        passed, own = {id(value) for value in outer.values()}, dict[str, Value]()
        for output, result in zip(callee.outputs, op.results, strict=True):
            value = inner[output.value.name]
            if id(value) not in passed:
                kind = value.type if op.devices is None else remap_devices(value.placed, op.devices)
                value = own.setdefault(value.name, Value(result.name, kind))
            found[result.name] = value
    return found
