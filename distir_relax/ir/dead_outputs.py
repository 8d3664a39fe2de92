"""Dead output elimination across function calls."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.ir.def_use import count_uses
from distir_relax.ir.program import Function, Module, Op


def remove_unused_outputs(module: Module) -> Module:
    """Remove function outputs that no caller uses, then functions that are not called; entries keep all outputs.

    A call whose results are all unused is removed: ops have no side effects.
    """
    entries = set(module.ranks) or {module.main.name}
    while True:
        used = _used(module)
        used_outputs = {
            f.name: [i for i in range(len(f.outputs)) if f.name in entries or (f.name, i) in used]
            for f in module.functions
        }
        functions = tuple(_keep(f, used_outputs) for f in module.functions if f.name in entries or used_outputs[f.name])
        if functions == module.functions:
            return module
        module = replace(module, functions=functions)


def _used(module: Module) -> set[tuple[str, int]]:
    """Return the outputs that callers use, as (function, output index)."""
    outputs: set[tuple[str, int]] = set()
    for function in module.functions:
        used_names = count_uses(function)
        calls = (op for op in function.ops if op.callee)
        outputs.update((op.callee, i) for op in calls for i, v in enumerate(op.results) if v.name in used_names)
    return outputs


def _keep(function: Function, used_outputs: dict[str, list[int]]) -> Function:
    ops: list[Op] = []
    for op in function.ops:
        if op.callee and len(used_outputs[op.callee]) < len(op.results):
            op = replace(op, results=tuple(op.results[i] for i in used_outputs[op.callee]))
        if op.results or not op.callee:
            ops.append(op)
    return replace(function, ops=tuple(ops), outputs=tuple(function.outputs[i] for i in used_outputs[function.name]))
