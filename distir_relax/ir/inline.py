"""Function calls written out: a program without calls, which does the same ops in the same order."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.errors import VerificationError
from distir_relax.ir.program import Function, Module, Op, Value, fresh_name
from distir_relax.ir.types import PlacedType


def on_devices(kind: PlacedType, devices: tuple[int, ...]) -> PlacedType:
    """A type of a function, whose devices are numbered from 0, as a call on `devices` has it."""
    return replace(kind, devices=tuple(devices[i] for i in kind.devices))


def verify_no_recursion(module: Module) -> None:
    """Raise `VerificationError` when a function calls itself, by way of others or not."""
    calls = {f.name: [op.callee for op in f.ops if op.callee] for f in module.functions}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise VerificationError(f"a function does not call itself, found {' -> '.join((*above, name))}")
        for callee in dict.fromkeys(calls.get(name, [])):
            visit(callee, (*above, name))

    for name in calls:
        visit(name, ())


def inline(module: Module) -> Module:
    """The module with its entry function alone, calls replaced by the ops of what they call.

    Raises `VerificationError` when a function calls itself.
    """
    verify_no_recursion(module)
    main = module.main
    if not any(op.callee for op in main.ops):
        return replace(module, functions=(main,)) if len(module.functions) > 1 else module
    taken = {i.value.name for i in main.inputs} | {v.name for op in main.ops for v in op.results}
    ops: list[Op] = []
    values = {i.value.name: i.value for i in main.inputs}
    _write(module, main, values, None, "", ops, taken)
    outputs = tuple(replace(o, value=values[o.value.name]) for o in main.outputs)
    return replace(module, functions=(replace(main, ops=tuple(ops), outputs=outputs),))


def _write(
    module: Module,
    function: Function,
    values: dict[str, Value],
    devices: tuple[int, ...] | None,
    prefix: str,
    ops: list[Op],
    taken: set[str],
) -> None:
    """Append the ops of `function`; `values` leads from its names to the values of the whole program."""
    for op in function.ops:
        operands = tuple(values[v.name] for v in op.operands)
        if op.callee:
            callee = module.function(op.callee)
            inner = {i.value.name: value for i, value in zip(callee.inputs, operands, strict=True)}
            numbers: tuple[int, ...] = op.attrs["devices"]  # type: ignore[assignment]
            onto = numbers if devices is None else tuple(devices[i] for i in numbers)
            _write(module, callee, inner, onto, f"{prefix}{op.results[0].name}." if op.results else prefix, ops, taken)
            for result, output in zip(op.results, callee.outputs, strict=True):
                values[result.name] = inner[output.value.name]
            continue
        results = []
        for value in op.results:
            kind = value.type
            if devices is not None:
                assert isinstance(kind, PlacedType)
                kind = on_devices(kind, devices)
            name = value.name if devices is None else fresh_name(prefix + value.name, taken)
            results.append(Value(name, kind))
            values[value.name] = results[-1]
        ops.append(Op(op.name, operands, tuple(results), op.attrs, op.location))
