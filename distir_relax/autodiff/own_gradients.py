"""Gradients that a model computes itself, by ops of its program (`ops.program.own_gradient`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Function, Op, Value, live_ops, required_ops
from distir_relax.ops import Builder, Trait, lookup


def has_own_gradient(op: Op) -> bool:
    """Whether the gradient of an op's result is computed by ops before it."""
    return not op.callee and Trait.OWN_GRADIENT in lookup(op.name, op.location).traits


def own_gradients(g: Builder, op: Op, ops: Sequence[Op], grad: Value | None) -> tuple[Value | None, ...]:
    """Repeat the ops from the seed of an op to its gradients with the gradient `grad`; return those of its operands.

    `ops` are those of the program up to it at least. `grad` is None if only other results are used. Raises
    `UnsupportedOpError` if the seed is in another function, so that it cannot be known what depends on it.
    """
    _, seed, *pairs = op.operands
    if grad is None:
        return (None,) * len(op.operands)
    if not any(seed == value for step in ops for value in step.results):
        raise UnsupportedOpError(
            "a pipeline stage ends within a torch.autograd.Function", op.location, "choose other stages: stages=[...]"
        )
    new = {seed.name: grad}
    for step in required_ops(ops, [value.name for value in pairs[1::2]]):
        if any(value.name in new for value in step.operands):
            results = tuple(Value(g.fresh(value.name), value.type) for value in step.results)
            g.ops.append(replace(step, operands=tuple(new.get(v.name, v) for v in step.operands), results=results))
            new.update({value.name: result for value, result in zip(step.results, results, strict=True)})
    found = [None if number % 2 else new.get(pairs[number + 1].name, pairs[number + 1]) for number in range(len(pairs))]
    return None, None, *found


def without_own_gradients(function: Function) -> Function:
    """Return a function in which results with gradients of their own are their values, and nothing else."""
    if not any(map(has_own_gradient, function.ops)):
        return function
    new: dict[str, Value] = {}
    ops = []
    for op in function.ops:
        op = replace(op, operands=tuple(new.get(value.name, value) for value in op.operands))
        if has_own_gradient(op):
            new.update({value.name: operand for value, operand in zip(op.results, op.operands[::2], strict=True)})
        else:
            ops.append(op)
    outputs = tuple(replace(o, value=new.get(o.value.name, o.value)) for o in function.outputs)
    function = replace(function, ops=tuple(ops), outputs=outputs)
    return replace(function, ops=live_ops(function))
