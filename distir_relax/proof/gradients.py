"""Gradients by the chain rule: an adjoint for each value, from the entries' gradients of each op; and their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from distir_relax.errors import UnsupportedOpError
from distir_relax.ir import Op, Value
from distir_relax.ops import Backward, Builder, Trait, backward_step, cast, lookup
from distir_relax.proof.numbering import Numbering, plain


def number_gradients(
    numbering: Numbering,
    ops: Sequence[Op],
    numbers: Mapping[str, int],
    loss: Value,
    wrt: Collection[str],
    scale: Value | None,
) -> dict[str, int]:
    """Return the numbers of the gradients of `loss`, see `emit_gradients`; `numbers` are those of the ops' values."""
    added, adjoints = emit_gradients(ops, numbers, loss, wrt, scale)
    known = numbering.add_all(added, dict(numbers))
    return {name: known[value.name] for name, value in adjoints.items()}


def emit_gradients(
    ops: Sequence[Op], names: Iterable[str], loss: Value, wrt: Collection[str], scale: Value | None
) -> tuple[Sequence[Op], dict[str, Value]]:
    """Return ops that compute the gradients of `loss` with respect to the values called `wrt`, and these gradients.

    Of `wrt` they are those that the loss depends on. `ops` compute it; `names` are those of all their values. With
    `scale`, a float32 scalar, gradients are those of the loss times it. Raises `UnsupportedOpError` for an op whose
    gradient is not defined.
    """
    depending = set(wrt)
    for op in ops:
        if any(value.name in depending for value in op.operands):
            depending.update(value.name for value in op.results if "float" in plain(value).tensor.dtype)
    g = Builder()
    g.reserve(names)
    one = g.constant(1.0, plain(loss).tensor.dtype) if scale is None else cast(g, scale, plain(loss).tensor.dtype)
    adjoints: dict[str, Value] = {loss.name: one}
    for op in reversed(ops):
        needed = frozenset(i for i, value in enumerate(op.operands) if value.name in depending)
        grads = tuple(adjoints.get(value.name) for value in op.results)
        if not needed or not any(grads):
            continue
        entry = lookup(op.name, op.location)
        gradient = entry.gradient
        if gradient is None:
            raise UnsupportedOpError(f"the op table has no gradient of {op.name}", op.location)
        operands, results = tuple(map(plain, op.operands)), tuple(map(plain, op.results))
        local = Op(op.name, operands, results, op.attrs, op.location)
        before = adjoints.get(op.operands[0].name) if gradient.accumulates else None
        if Trait.OWN_GRADIENT in entry.traits:
            found = _own(g, ops[: ops.index(op)], operands, grads[0])
        else:
            found = backward_step(gradient, Backward(g, local, grads, needed, before))
        for index, (operand, adjoint) in enumerate(zip(operands, found, strict=True)):
            if adjoint is None:
                continue
            other = adjoints.get(operand.name) if index or before is None else None
            adjoints[operand.name] = adjoint if other is None else g.emit("add", other, adjoint)
    return g.ops, {name: adjoints[name] for name in wrt if name in adjoints}


def _own(g: Builder, ops: Sequence[Op], operands: Sequence[Value], grad: Value | None) -> tuple[Value | None, ...]:
    """Return the gradients of an op's operands that the ops from its seed, operand 1, compute of `grad` instead."""
    of: dict[str, Value] = {} if grad is None else {operands[1].name: grad}
    for op in ops if of else ():
        if any(value.name in of for value in op.operands):
            made = g.emit(op.name, *(of.get(v.name, plain(v)) for v in op.operands), **op.attrs)
            of.update(zip((v.name for v in op.results), made if isinstance(made, tuple) else (made,), strict=True))
    return tuple(of.get(operands[i + 1].name) if i > 1 and not i % 2 else None for i in range(len(operands)))
