"""Reverse-mode differentiation of straight-line code: from the gradients of its results to those of its operands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Op, Value
from distir_relax.ops import Backward, Builder, backward_step, lookup

StepOf = Callable[[Op, tuple[Value | None, ...], frozenset[int]], tuple[Value | None, ...]]
"""The gradients of an op's operands, from the op, the gradients of its results, and the operands asked for."""


def is_differentiable(value: Value) -> bool:
    """Whether a value may have a gradient: floats have."""
    return "float" in value.tensor.dtype


def depends_on(ops: Sequence[Op], sources: Collection[str]) -> set[str]:
    """The names of the differentiable values that depend on `sources`, these included."""
    found = set(sources)
    for op in ops:
        if any(v.name in found for v in op.operands):
            found.update(v.name for v in op.results if is_differentiable(v))
    return found


def gradients(
    g: Builder, ops: Sequence[Op], seeds: Mapping[str, Value], wanted: Collection[str], call: StepOf | None = None
) -> dict[str, Value]:
    """Write with `g` the backward steps of `ops`, and give the gradients of the values `wanted`, by name.

    `seeds` are the gradients of values that the ops make, by name: what the gradients are taken of. What does not
    depend on them has none in the result. `call` is the step of a function's call. Each step is written at the place of
    its op, and named after the operand: ``%h.grad``. Raises `UnsupportedOpError` for an op of which the table does not
    say how it is differentiated.
    """
    active = depends_on(ops, wanted)
    found = dict(seeds)
    for op in reversed(ops):
        grads = tuple(found.get(v.name) for v in op.results)
        asked = frozenset(i for i, v in enumerate(op.operands) if v.name in active)
        if not asked or all(grad is None for grad in grads):
            continue
        g.location, g.hint = op.location, f"{op.operands[min(asked)].name}.grad"
        step = call(op, grads, asked) if op.callee and call is not None else _step(g, op, grads, asked)
        for operand, grad in zip(op.operands, step, strict=True):
            if grad is not None:
                g.hint = f"{operand.name}.grad"
                known = found.get(operand.name)
                found[operand.name] = grad if known is None else g.emit("add", known, grad)
    g.hint = ""
    return {name: found[name] for name in wanted if name in found}


def _step(g: Builder, op: Op, grads: tuple[Value | None, ...], asked: frozenset[int]) -> tuple[Value | None, ...]:
    gradient = lookup(op.name, op.location).gradient
    if gradient is None:
        raise UnsupportedOpError(
            f"the op table does not say how {op.name} is differentiated",
            op.location,
            "give its entry a gradient (CONTRIBUTING.md shows how), or leave what depends on it out of the loss",
        )
    return backward_step(gradient, Backward(g, op, grads, asked))
