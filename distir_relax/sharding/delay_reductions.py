"""Delay reductions of partial sums as long as that is legal and not more expensive.

``redistribute(I -> R)`` moves after an op that is linear in its operand, if nothing else uses the reduced value and the
op does not enlarge it: ``multiply(all_reduce(Z), C)`` becomes ``all_reduce(multiply(Z, C))`` (the RFC's global
optimization). Where an `add` takes two partial sums, one reduction remains.

A reduction that also splits its result, ``redistribute(I -> S)``, only moves after a sum whose terms are all reduced
and split alike, in functions of the program: the gradients of activations between blocks, with sequence parallelism.
The entry adds up gradients of microbatches, which are split one by one so that none is stored whole. It also moves
after a cast that counts as linear (`autodiff.LinearCasts`), so that the sum has the dtype of that, and up to a result
that has fewer elements: gradients of keys are added up over the queries' heads that they serve before they are sent.

Ops that an ``I[sum]`` operand may pass through, along its mesh axis:

==========================================  =====================================
op linear in the operand, others ``R``      passes (matmul, multiply, divide by R, reshape, sum, …)
cast that counts as linear                  passes
``I + I``, concat, where: jointly linear    passes when all of them are ``I``
``I + R``, ``I * I``, relu, gelu, max, …    must be reduced first
times infinity or NaN, by zero              must be reduced first if known at compile time
==========================================  =====================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from distir_relax.ir import (
    PLACEMENTS,
    DTensorType,
    Function,
    Module,
    Op,
    Value,
    callees_first,
    count_uses,
    fresh_name,
    producers,
    value_names,
)
from distir_relax.layout import DTYPES, Partial, Placement, Replicate, Shard, is_always
from distir_relax.ops import Trait, lookup
from distir_relax.sharding.nonfinite import NonfiniteValues, propagate_nonfinite


@dataclass(frozen=True, slots=True)
class DelayReductions:
    """Pass: sharded stage in and out. `hazards` describes constants of the entry function that block a delay.

    With `stages_apart`, partial sums of different pipeline stages are not added before they are reduced.
    """

    hazards: NonfiniteValues = field(default=NonfiniteValues(), repr=False)
    stages_apart: bool = False

    takes: ClassVar[tuple[str, ...]] = ("sharded",)
    gives: ClassVar[str] = "sharded"

    def run(self, module: Module) -> Module:
        """Move every reduction as late as is legal and not more expensive; also out of functions, to their calls."""
        if not any(_is_redistribution(op) for function in module.functions for op in function.ops):
            return module
        hazards_of = propagate_nonfinite(module, self.hazards)
        names = {f.name: value_names(f) for f in module.functions}
        remaining: dict[str, dict[int, Op]] = {}
        delayed: dict[str, Function] = {}
        for function in callees_first(module):
            function = _append_reductions(function, remaining, names[function.name])
            stages = _stages(function) if self.stages_apart else {}
            is_entry = function.name == module.main.name
            function = _delay(function, hazards_of.get(function.name, NonfiniteValues()), stages, not is_entry)
            if not is_entry:
                function, remaining[function.name] = _split_trailing_reductions(function)
            delayed[function.name] = function
        return replace(module, functions=tuple(delayed[f.name] for f in module.functions))


def _split_trailing_reductions(function: Function) -> tuple[Function, dict[int, Op]]:
    """Remove reductions right before outputs; return the function and these reductions, by output number."""
    uses, producer_of = count_uses(function), producers(function)
    last = {
        number: op
        for number, output in enumerate(function.outputs)
        if (op := producer_of.get(output.value.name)) is not None
        and _is_redistribution(op)
        and _reduced_axes(op)
        and uses[output.value.name] == 1
    }
    outputs = tuple(replace(o, value=last[i].operands[0]) if i in last else o for i, o in enumerate(function.outputs))
    removed = {op.results[0].name for op in last.values()}
    ops = tuple(op for op in function.ops if op.results[0].name not in removed)
    return replace(function, ops=ops, outputs=outputs), last


def _append_reductions(function: Function, remaining: Mapping[str, Mapping[int, Op]], names: set[str]) -> Function:
    """Insert after each call the reductions removed from its callee."""
    ops: list[Op] = []
    for op in function.ops:
        pending_reductions = remaining.get(op.callee, {}) if op.callee else {}
        if not pending_reductions:
            ops.append(op)
            continue
        results, reductions = list(op.results), []
        for number, reduction in pending_reductions.items():
            reduced = op.results[number]
            partial = replace(reduction.operands[0], name=fresh_name(f"{reduced.name}.partial", names))
            results[number] = partial
            reductions.append(replace(reduction, operands=(partial,), results=(reduced,), location=op.location))
        ops += [replace(op, results=tuple(results)), *reductions]
    return replace(function, ops=tuple(ops))


def _stages(function: Function) -> dict[str, frozenset[object]]:
    """Return the pipeline stages that each value is computed on."""
    stages_of: dict[str, frozenset[object]] = {}
    for op in function.ops:
        stages = {op.task["stage"]} if op.task else {s for v in op.operands for s in stages_of.get(v.name, ())}
        stages_of.update((v.name, frozenset(stages)) for v in op.results)
    return stages_of


def _delay(
    function: Function, hazards: NonfiniteValues, stages: Mapping[str, frozenset[object]], with_scatters: bool
) -> Function:
    uses, shrinking = count_uses(function), _shrinking(function)
    ops: dict[str, Op] = {}
    reductions: dict[str, Op] = {}
    """Maps values to the `redistribute` ops that define them and only reduce, or reduce and split."""
    for op in function.ops:
        rewrite = (
            None if _is_redistribution(op) else _move(op, reductions, uses, hazards, stages, with_scatters, shrinking)
        )
        if rewrite is None:
            ops[op.results[0].name] = op
            if _is_redistribution(op) and (_reduced_axes(op) or _scatters(op)):
                reductions[op.results[0].name] = op
            continue
        removed, new, reduction = rewrite
        for other in removed:
            del ops[other.results[0].name]
        ops |= {new.results[0].name: new, reduction.results[0].name: reduction}
        reductions[reduction.results[0].name] = reduction
    return replace(function, ops=tuple(ops.values()))


def _move(
    op: Op,
    reductions: dict[str, Op],
    uses: Counter[str],
    hazards: NonfiniteValues,
    stages: Mapping[str, frozenset[object]],
    with_scatters: bool,
    shrinking: Set[str],
) -> tuple[list[Op], Op, Op] | None:
    """Return the reductions to remove, the op on partial operands, and the reduction after it; or None."""
    if len(op.results) != 1:
        return None
    for group in lookup(op.name, op.location).linear_sets(len(op.operands), op.attrs):
        candidates = [reductions.get(op.operands[i].name) for i in sorted(group)]
        if any(r is None or uses[r.results[0].name] != 1 for r in candidates):
            continue
        if hazards.stop(op, group) or len({stages.get(op.operands[i].name) for i in group}) > 1:
            continue
        removed = [r for r in candidates if r is not None]
        partial_placements = _before(op, group, removed, with_scatters, op.operands[0].name in shrinking)
        result = op.results[0]
        if not partial_placements or _elements(result) > sum(_elements(r.results[0]) for r in removed):
            continue
        operands = list(op.operands)
        for i, r in zip(sorted(group), removed, strict=True):
            operands[i] = r.operands[0]
        kind = result.dtensor
        partial = Value(f"{result.name}.partial", replace(kind, placements=partial_placements))
        new = replace(op, operands=tuple(operands), results=(partial,))
        target = {PLACEMENTS: kind.placements}
        return removed, new, Op("redistribute", (partial,), (result,), target, removed[0].location)
    return None


def _shrinking(function: Function) -> set[str]:
    """Return the values that linear ops of one operand, used nowhere else, make smaller in the end."""
    users: dict[str, list[Op]] = defaultdict(list)
    for op in function.ops:
        for value in op.operands:
            users[value.name].append(op)
    outputs = {output.value.name for output in function.outputs}
    found: set[str] = set()
    for op in reversed(function.ops):
        for value in op.results:
            user = users[value.name][0] if len(users[value.name]) == 1 and value.name not in outputs else None
            if (
                user is None
                or user.callee
                or len(user.operands) != 1
                or len(user.results) != 1
                or _is_redistribution(user)
            ):
                continue
            result, is_linear = user.results[0], bool(lookup(user.name, user.location).linear_sets(1, user.attrs))
            if is_linear and (result.name in found or is_always(_elements(result), "<", _elements(value))):
                found.add(value.name)
    return found


def _before(
    op: Op, group: frozenset[int], removed: Sequence[Op], with_scatters: bool, is_shrunk: bool
) -> tuple[Placement, ...]:
    """Return the placements of an op's result before it is reduced, if the reductions of the operands of `group` are
    removed; empty if they cannot be."""
    axes = _reduced_axes(removed[0])
    if axes:
        if any(_reduced_axes(r) != axes for r in removed) or not _others_replicated(op, group, axes):
            return ()
        return tuple(Partial("sum") if i in axes else p for i, p in enumerate(op.results[0].dtensor.placements))
    if is_shrunk:
        changed = _changed_axes(removed[0])
        return tuple(Partial("sum") if i in changed else p for i, p in enumerate(op.results[0].dtensor.placements))
    if Trait.POINTWISE not in lookup(op.name, op.location).traits or len(group) != len(op.operands):
        return ()
    # Each device would add whole tensors rather than parts: of several reductions one remains for that.
    types = {(r.operands[0].type, r.results[0].type) for r in removed}
    is_sum = len(group) > 1 and with_scatters and types == {(removed[0].operands[0].type, op.results[0].type)}
    return removed[0].operands[0].dtensor.placements if is_sum or _is_cast(op) else ()


def _is_cast(op: Op) -> bool:
    return len(op.operands) == 1 and op.operands[0].dtensor.dtype != op.results[0].dtensor.dtype


def _scatters(op: Op) -> bool:
    """Return whether a `redistribute` reduces a sum and splits it, and does nothing else."""
    source, target = op.operands[0].dtensor.placements, op.results[0].dtensor.placements
    changed = [(source[i], target[i]) for i in _changed_axes(op)]
    return all(a == Partial("sum") for a, _ in changed) and any(isinstance(b, Shard) for _, b in changed)


def _changed_axes(op: Op) -> list[int]:
    """Return the mesh axes along which a `redistribute` changes the placement."""
    placements = zip(op.operands[0].dtensor.placements, op.results[0].dtensor.placements, strict=True)
    return [i for i, (a, b) in enumerate(placements) if a != b]


def _reduced_axes(op: Op) -> tuple[int, ...]:
    """Return the axes along which a `redistribute` converts ``I[sum]`` to ``R``; empty if it does anything else."""
    source, target = op.operands[0].dtensor, op.results[0].dtensor
    changed = _changed_axes(op)
    sums = [
        i for i in changed if source.placements[i] == Partial("sum") and isinstance(target.placements[i], Replicate)
    ]
    return tuple(sums) if sums == changed else ()


def _others_replicated(op: Op, group: frozenset[int], axes: tuple[int, ...]) -> bool:
    kinds = [v.type for i, v in enumerate(op.operands) if i not in group] + [v.type for v in op.results]
    return all(isinstance(k, DTensorType) and isinstance(k.placements[a], Replicate) for k in kinds for a in axes)


def _is_redistribution(op: Op) -> bool:
    return Trait.REDISTRIBUTION in lookup(op.name, op.location).traits


def _elements(value: Value) -> int:
    return value.dtensor.tensor.bytes // DTYPES[value.dtensor.dtype][1]
