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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import (
    DTensorType,
    Function,
    Module,
    Op,
    Value,
    called_first,
    count_uses,
    fresh_name,
    makers,
    value_names,
)
from distir_relax.layout import Partial, Replicate, print_placements
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.nonfinite import Hazards, spread


@dataclass(frozen=True, slots=True)
class DelayReductions:
    """The pass: sharded stage in and out. `hazards` is what is known of the entry function's constants.

    With `stages_apart`, sums of what different stages of a pipeline make do not meet before they are reduced.
    """

    hazards: Hazards = field(default=Hazards(), repr=False)
    stages_apart: bool = False

    takes: ClassVar[tuple[str, ...]] = ("sharded",)
    gives: ClassVar[str] = "sharded"

    def run(self, module: Module) -> Module:
        """Move every reduction as late as is legal and no dearer; out of functions, too, to where they are called."""
        if not any(_is_redistribution(op) for function in module.functions for op in function.ops):
            return module
        known = spread(module, self.hazards)
        names = {f.name: value_names(f) for f in module.functions}
        left: dict[str, dict[int, Op]] = {}
        delayed: dict[str, Function] = {}
        for function in called_first(module):
            function = _with_reductions_of_calls(function, left, names[function.name])
            stages = _stages(function) if self.stages_apart else {}
            function = _delay(function, known.get(function.name, Hazards()), stages)
            if function.name != module.main.name:
                function, left[function.name] = _without_last_reductions(function)
            delayed[function.name] = function
        return replace(module, functions=tuple(delayed[f.name] for f in module.functions))


def _without_last_reductions(function: Function) -> tuple[Function, dict[int, Op]]:
    """The function with results as they are before a last reduction; and these reductions, by number of output."""
    uses, made = count_uses(function), makers(function)
    left = {
        number: op
        for number, output in enumerate(function.outputs)
        if (op := made.get(output.value.name)) is not None
        and _is_redistribution(op)
        and _reduced_axes(op)
        and uses[output.value.name] == 1
    }
    outputs = tuple(replace(o, value=left[i].operands[0]) if i in left else o for i, o in enumerate(function.outputs))
    gone = {op.results[0].name for op in left.values()}
    ops = tuple(op for op in function.ops if op.results[0].name not in gone)
    return replace(function, ops=ops, outputs=outputs), left


def _with_reductions_of_calls(function: Function, left: Mapping[str, Mapping[int, Op]], taken: set[str]) -> Function:
    """The function with the reductions behind its calls that what they call has `left` to it."""
    ops: list[Op] = []
    for op in function.ops:
        missing = left.get(op.callee, {}) if op.callee else {}
        results, behind = list(op.results), []
        for number, reduction in missing.items():
            whole = op.results[number]
            pending = replace(reduction.operands[0], name=fresh_name(f"{whole.name}.partial", taken))
            results[number] = pending
            behind.append(replace(reduction, operands=(pending,), results=(whole,), location=op.location))
        ops += [replace(op, results=tuple(results)), *behind]
    return replace(function, ops=tuple(ops))


def _stages(function: Function) -> dict[str, frozenset[object]]:
    """Of which stages of a pipeline each value is made."""
    found: dict[str, frozenset[object]] = {}
    for op in function.ops:
        stages = {op.task["stage"]} if op.task else {s for v in op.operands for s in found.get(v.name, ())}
        found.update((v.name, frozenset(stages)) for v in op.results)
    return found


def _delay(function: Function, hazards: Hazards, stages: Mapping[str, frozenset[object]]) -> Function:
    uses = count_uses(function)
    ops: dict[str, Op] = {}
    reductions: dict[str, Op] = {}
    """The `redistribute` ops, by the value they define, that reduce along one or more axes."""
    for op in function.ops:
        moved = None if _is_redistribution(op) else _move(op, reductions, uses, hazards, stages)
        if moved is None:
            ops[op.results[0].name] = op
            if _is_redistribution(op) and _reduced_axes(op):
                reductions[op.results[0].name] = op
            continue
        gone, new, reduction = moved
        for other in gone:
            del ops[other.results[0].name]
        ops |= {new.results[0].name: new, reduction.results[0].name: reduction}
        reductions[reduction.results[0].name] = reduction
    return replace(function, ops=tuple(ops.values()))


def _move(
    op: Op,
    reductions: dict[str, Op],
    uses: Counter[str],
    hazards: Hazards,
    stages: Mapping[str, frozenset[object]],
) -> tuple[list[Op], Op, Op] | None:
    """The reductions that go, the op on pending operands, and the reduction behind it; or None."""
    if len(op.results) != 1:
        return None
    for group in lookup(op.name, op.location).linear_sets(len(op.operands), op.attrs):
        found = [reductions.get(op.operands[i].name) for i in sorted(group)]
        if any(r is None or uses[r.results[0].name] != 1 for r in found):
            continue
        if hazards.stop(op, group) or len({stages.get(op.operands[i].name) for i in group}) > 1:
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
