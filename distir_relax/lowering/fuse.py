"""Local optimisation of a rank's program: several ops become the one fused op that stands for them.

Which fused ops there are, and what they stand for, is said by their entries in the op table (`OpDef.pattern`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op
from distir_relax.ops import infer, tensor_type
from distir_relax.ops.patterns import fusions, match


@dataclass(frozen=True, slots=True)
class FuseLocal:
    """The pass: ranked stage in and out."""

    def run(self, module: Module) -> Module:
        """Fuse in every function. Equal ranks stay equal."""
        return replace(module, functions=tuple(_fuse(f) for f in module.functions))


def _fuse(function: Function) -> Function:
    uses = Counter(v.name for op in function.ops for v in op.operands)
    uses.update(o.value.name for o in function.outputs)
    single = {name: count == 1 for name, count in uses.items()}
    producers = {v.name: op for op in function.ops for v in op.results}
    fused: dict[str, Op] = {}
    gone: set[str] = set()
    # From the last op to the first, so that the largest pattern takes what smaller ones inside it would.
    for op in reversed(function.ops):
        if op.results[0].name in gone:
            continue
        for name, pattern in fusions():
            found = match(pattern, op, producers, single)
            if found is None or any(o.results[0].name in gone for o in found.inner):
                continue
            try:
                types = infer(name, [tensor_type(v) for v in found.operands], {})
            except VerificationError:
                continue
            if types != tuple(v.type for v in op.results):
                continue
            fused[op.results[0].name] = Op(name, found.operands, op.results, {}, op.location)
            gone.update(o.results[0].name for o in found.inner)
            break
    ops = [fused.get(op.results[0].name, op) for op in function.ops if op.results[0].name not in gone]
    return replace(function, ops=tuple(_without_unused(ops, {o.value.name for o in function.outputs})))


def _without_unused(ops: list[Op], outputs: set[str]) -> list[Op]:
    """Scalars that only fused ops used are left over."""
    used = set(outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if "step" in op.attrs or any(v.name in used for v in op.results):
            used.update(v.name for v in op.operands)
            kept.append(op)
    return kept[::-1]
