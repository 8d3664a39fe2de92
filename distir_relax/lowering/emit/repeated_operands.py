"""Operands before their elements are repeated: keys and values of grouped-query attention.

Models repeat each head of the keys for the query heads of its group. Ops whose kernel does that itself
(`Code.unrepeated`) take the operand before, so that no copy of it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distir_relax.ir import Function, Op, Size, Value, live_ops, producers
from distir_relax.layout import is_symbolic
from distir_relax.ops import Trait, lookup


def without_repeats(function: Function) -> Function:
    """Return a function whose ops take operands before they are repeated, with attribute ``grouped``."""
    made_by = producers(function)
    ops = []
    for op in function.ops:
        numbers = () if op.callee else lookup(op.name, op.location).code.unrepeated
        found = {n: operand_before_repeat(op.operands[n], made_by) for n in numbers}
        before = [value for value in found.values() if value is not None]
        if before and len(before) == len(numbers) and len({value.tensor.shape[1] for value in before}) == 1:
            operands = tuple(found.get(n) or value for n, value in enumerate(op.operands))
            op = replace(op, operands=operands, attrs={**op.attrs, "grouped": True})
        ops.append(op)
    changed = replace(function, ops=tuple(ops))
    return function if changed.ops == function.ops else replace(changed, ops=live_ops(changed, _has_effects))


def operand_before_repeat(value: Value, made_by: dict[str, Op]) -> Value | None:
    """Return a value (b, h, ...) that is repeated to one of (b, h g, ...), each element of dim 1 in a row.

    One element is repeated by a broadcast, several by a broadcast along a new dim, which is joined with dim 1 after it.
    """
    shapes = [value.tensor.shape]
    for _ in range(3):
        op = made_by.get(value.name)
        if op is None or op.callee or len(op.operands) != 1 or op.attrs.keys() != {"shape"}:
            return None
        if Trait.MOVES not in lookup(op.name, op.location).traits:
            return None
        value = op.operands[0]
        shapes.append(value.tensor.shape)
        if len(shapes) == 2 and _is_broadcast_of_one(*shapes):
            return value
    repeated, spread, alone, before = shapes
    if len(before) < 2 or len(spread) != len(before) + 1 or is_symbolic((before[1], spread[2])) or not before[1]:
        return None
    rest = before[2:]
    is_repeat = alone == (before[0], before[1], 1, *rest) and spread == (before[0], before[1], spread[2], *rest)
    return value if is_repeat and repeated == (before[0], before[1] * spread[2], *rest) else None


def _is_broadcast_of_one(after: Sequence[Size], before: Sequence[Size]) -> bool:
    """Return whether these shapes differ in dim 1 alone, which has one element before."""
    return (
        len(before) == len(after) > 1
        and (*before[:1], *before[2:]) == (*after[:1], *after[2:])
        and before[1] == 1 != after[1]
        and not is_symbolic((after[1],))
    )


def _has_effects(op: Op) -> bool:
    return bool(op.callee) or Trait.COMMUNICATES in lookup(op.name, op.location).traits
