"""Pending sums are reduced as late as is legal.

``redistribute(I -> R)`` moves behind an op that is linear in the operand it feeds, when nothing else uses the reduced
value and the op does not make it larger: ``multiply(all_reduce(Z), C)`` becomes ``all_reduce(multiply(Z, C))`` (the
RFC's global optimisation). Where two pending sums meet in an `add`, one reduction is left.

What an ``I[sum]`` operand may pass through, along its mesh axis:

==========================================  =====================================
op linear in the operand, others ``R``      passes (matmul, multiply, divide by R, reshape, sum, …)
``I + I``, concat, where: jointly linear    passes when all of them are ``I``
``I + R``, ``I * I``, relu, gelu, max, …    must be reduced first
times infinity or NaN, by zero              must be reduced first where it is known
==========================================  =====================================
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import DTensorType, Function, Module, Op, Value, count_uses
from distir_relax.layout import Partial, Replicate, print_placements
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.hazards import Hazards, spread


@dataclass(frozen=True, slots=True)
class DelayReductions:
    """The pass: sharded stage in and out. `hazards` is what is known of the entry function's constants."""

    hazards: Hazards = field(default=Hazards(), repr=False)

    takes: ClassVar[tuple[str, ...]] = ("sharded",)
    gives: ClassVar[str] = "sharded"

    def run(self, module: Module) -> Module:
        """Move every reduction as late as is legal and no dearer. None leaves its function or enters another."""
        known = spread(module, self.hazards)
        return replace(module, functions=tuple(_delay(f, known.get(f.name, Hazards())) for f in module.functions))


def _delay(function: Function, hazards: Hazards) -> Function:
    uses = count_uses(function)
    ops: list[Op] = []
    reductions: dict[str, Op] = {}
    """The `redistribute` ops, by the value they define, that reduce along one or more axes."""
    for op in function.ops:
        moved = None if _is_redistribution(op) else _move(op, reductions, uses, hazards)
        if moved is None:
            ops.append(op)
            if _is_redistribution(op) and _reduced_axes(op):
                reductions[op.results[0].name] = op
            continue
        gone, new, reduction = moved
        ops = [o for o in ops if o not in gone] + [new, reduction]
        reductions[reduction.results[0].name] = reduction
    return replace(function, ops=tuple(ops))


def _move(op: Op, reductions: dict[str, Op], uses: Counter[str], hazards: Hazards) -> tuple[list[Op], Op, Op] | None:
    """The reductions that go, the op on pending operands, and the reduction behind it; or None."""
    if len(op.results) != 1:
        return None
    for group in lookup(op.name, op.location).linear_sets(len(op.operands), op.attrs):
        found = [reductions.get(op.operands[i].name) for i in sorted(group)]
        if any(r is None or uses[r.results[0].name] != 1 for r in found):
            continue
        if hazards.stop(op, group):
            continue
        gone = [r for r in found if r is not None]
        axes = _reduced_axes(gone[0])
        if any(_reduced_axes(r) != axes for r in gone) or not _others_whole(op, group, axes):
            continue
        result = op.results[0]
        if _size(result) > sum(_size(r.results[0]) for r in gone):
            continue
        operands = list(op.operands)
        for i, r in zip(sorted(group), gone, strict=True):
            operands[i] = r.operands[0]
        kind = result.dtensor
        pending = tuple(Partial("sum") if i in axes else p for i, p in enumerate(kind.placements))
        partial = Value(f"{result.name}.partial", replace(kind, placements=pending))
        new = replace(op, operands=tuple(operands), results=(partial,))
        target = {"placements": print_placements(kind.placements)}
        return gone, new, Op("redistribute", (partial,), (result,), target, gone[0].location)
    return None


def _reduced_axes(op: Op) -> tuple[int, ...]:
    """The axes along which a `redistribute` takes ``I[sum]`` to ``R``; empty when it does anything else besides."""
    source, target = op.operands[0].dtensor, op.results[0].dtensor
    changed = [i for i, (a, b) in enumerate(zip(source.placements, target.placements, strict=True)) if a != b]
    sums = [
        i for i in changed if source.placements[i] == Partial("sum") and isinstance(target.placements[i], Replicate)
    ]
    return tuple(sums) if sums == changed else ()


def _others_whole(op: Op, group: frozenset[int], axes: tuple[int, ...]) -> bool:
    kinds = [v.type for i, v in enumerate(op.operands) if i not in group] + [v.type for v in op.results]
    return all(isinstance(k, DTensorType) and isinstance(k.placements[a], Replicate) for k in kinds for a in axes)


def _is_redistribution(op: Op) -> bool:
    return Trait.REDISTRIBUTION in lookup(op.name, op.location).traits


def _size(value: Value) -> int:
    return value.dtensor.tensor.bytes
