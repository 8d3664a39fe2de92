"""Local optimisation of programs: several ops become the one fused op that stands for them.

A rank runs its program so; a program of the distributed stage is fused the same way before it is simulated. Which fused
ops there are, and what they stand for, is said by their entries in the op table (`Code.pattern`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op, PlacedType, count_uses, live_ops, makers
from distir_relax.ops import Trait, infer, lookup
from distir_relax.ops.table.patterns import Match, fusions, match
from distir_relax.ops.table.spmd_inference import infer_placed


@dataclass(frozen=True, slots=True)
class FuseLocal:
    """The pass: ranked or distributed stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Fuse in every function. Equal ranks stay equal; in the distributed stage, what runs on the same devices."""
        return replace(module, functions=tuple(_fuse(f) for f in module.functions))


def _fuse(function: Function) -> Function:
    single = {name: count == 1 for name, count in count_uses(function).items()}
    producers = makers(function)
    fused: dict[str, Op] = {}
    gone: set[str] = set()
    # From the last op to the first, so that the largest pattern takes what smaller ones inside it would.
    for op in reversed(function.ops):
        if not op.results or op.results[0].name in gone:
            continue
        for name, pattern in fusions():
            found = match(pattern, op, producers, single)
            if found is None or any(o.results[0].name in gone for o in found.inner):
                continue
            if not _gives(name, found, op):
                continue
            fused[op.results[0].name] = Op(name, found.operands, op.results, {}, op.location)
            gone.update(o.results[0].name for o in found.inner)
            break
    kept = [op for op in function.ops if not op.results or op.results[0].name not in gone]
    ops = [fused.get(op.results[0].name, op) if op.results else op for op in kept]
    written = replace(function, ops=tuple(ops))
    # Scalars that only a fused op's pattern used are gone with it.
    return replace(written, ops=live_ops(written, _is_needed_elsewhere))


def _gives(name: str, found: Match, op: Op) -> bool:
    """Whether the fused op can stand for `op`: it gives the same types, on the same devices."""
    kinds = [v.type for v in found.operands]
    placed = [kind for kind in kinds if isinstance(kind, PlacedType)]
    made = [v.type for o in (*found.inner, op) for v in o.results]
    if any("stream" in o.attrs for o in (*found.inner, op)):
        return False
    try:
        if not placed:
            return infer(name, [v.tensor for v in found.operands], {}) == tuple(v.type for v in op.results)
        if len({kind.devices for kind in (*placed, *made) if isinstance(kind, PlacedType)}) > 1:
            return False
        return infer_placed(name, placed, {}, placed[0].devices) == tuple(v.type for v in op.results)
    except VerificationError:
        return False


def _is_needed_elsewhere(op: Op) -> bool:
    """Whether an op does something besides giving its results: other devices take part in it, or in what it calls."""
    return not lookup(op.name, op.location).traits.isdisjoint({Trait.COMMUNICATES, Trait.CALL})
