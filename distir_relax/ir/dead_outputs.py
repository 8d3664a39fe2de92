"""What functions give and nobody uses is left out."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.ir.def_use import count_uses
from distir_relax.ir.program import Function, Module, Op


def without_unused_outputs(module: Module) -> Module:
    """The module whose functions, but for entries, give what some caller uses; and are called.

    A call that gives nothing is left out: its ops change nothing.
    """
    entries = set(module.ranks) or {module.main.name}
    while True:
        used = _used(module)
        kept = {
            f.name: [i for i in range(len(f.outputs)) if f.name in entries or (f.name, i) in used]
            for f in module.functions
        }
        functions = tuple(_keep(f, kept) for f in module.functions if f.name in entries or kept[f.name])
        if functions == module.functions:
            return module
        module = replace(module, functions=functions)


def _used(module: Module) -> set[tuple[str, int]]:
    """The outputs of functions that callers use, as (function, number)."""
    found: set[tuple[str, int]] = set()
    for function in module.functions:
        names = count_uses(function)
        calls = (op for op in function.ops if op.callee)
        found.update((op.callee, i) for op in calls for i, v in enumerate(op.results) if v.name in names)
    return found


def _keep(function: Function, kept: dict[str, list[int]]) -> Function:
    ops: list[Op] = []
    for op in function.ops:
        if op.callee and len(kept[op.callee]) < len(op.results):
            op = replace(op, results=tuple(op.results[i] for i in kept[op.callee]))
        if op.results or not op.callee:
            ops.append(op)
    return replace(function, ops=tuple(ops), outputs=tuple(function.outputs[i] for i in kept[function.name]))
