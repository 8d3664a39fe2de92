"""Reverse-mode differentiation of straight-line code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from distir_relax.autodiff.own_gradients import has_own_gradient, own_gradients
from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Op, Value
from distir_relax.ops import Backward, Builder, backward_step, lookup

BackwardStep = Callable[[Op, tuple[Value | None, ...], frozenset[int]], tuple[Value | None, ...]]
"""Returns the gradients of an op's operands, given the op, the gradients of its results, and the operands to do."""


def is_differentiable(value: Value) -> bool:
    """Whether a value can have a gradient: it must be of a floating dtype."""
    return "float" in value.tensor.dtype


def depends_on(ops: Sequence[Op], sources: Collection[str]) -> set[str]:
    """Return the names of differentiable values that depend on `sources`, including those."""
    active = set(sources)
    for op in ops:
        if any(v.name in active for v in op.operands):
            active.update(v.name for v in op.results if is_differentiable(v))
    return active


def gradients(
    g: Builder, ops: Sequence[Op], seeds: Mapping[str, Value], wrt: Collection[str], call: BackwardStep | None = None
) -> dict[str, Value]:
    """Build the backward steps of `ops` with `g`; return the gradients of the values `wrt`, by name.

    `seeds` are the gradients of results of the ops, by name. Values on which no seed depends are missing in the result.
    `call` is the backward step of function calls. Each step has the location of its op, and results named after the
    operand: ``%h.grad``. Raises `UnsupportedOpError` for an op whose table entry has no gradient.
    """
    active = depends_on(ops, wrt)
    grad_of = dict(seeds)
    for op in reversed(ops):
        grads = tuple(grad_of.get(v.name) for v in op.results)
        indices = frozenset(i for i, v in enumerate(op.operands) if v.name in active)
        if not indices or all(grad is None for grad in grads):
            continue
        g.location, g.hint = op.location, f"{op.operands[min(indices)].name}.grad"
        so_far = grad_of.get(op.operands[0].name) if not op.callee and _accumulates(op) else None
        if op.callee and call is not None:
            step = call(op, grads, indices)
        elif has_own_gradient(op):
            step = own_gradients(g, op, ops, grads[0])
        else:
            step = _step(g, op, grads, indices, so_far)
        for number, (operand, grad) in enumerate(zip(op.operands, step, strict=True)):
            if grad is not None:
                g.hint = f"{operand.name}.grad"
                partial_grad = grad_of.get(operand.name) if number or so_far is None else None
                grad_of[operand.name] = grad if partial_grad is None else g.emit("add", partial_grad, grad)
    g.hint = ""
    return {name: grad_of[name] for name in wrt if name in grad_of}


def _accumulates(op: Op) -> bool:
    gradient = lookup(op.name, op.location).gradient
    return gradient is not None and gradient.accumulates


def _step(
    g: Builder, op: Op, grads: tuple[Value | None, ...], indices: frozenset[int], so_far: Value | None
) -> tuple[Value | None, ...]:
    gradient = lookup(op.name, op.location).gradient
    if gradient is None:
        raise UnsupportedOpError(
            f"the op table has no gradient of {op.name}",
            op.location,
            "give its entry a gradient (CONTRIBUTING.md shows how), or leave what depends on it out of the loss",
        )
    return backward_step(gradient, Backward(g, op, grads, indices, so_far))
