"""Operands before their elements are repeated: keys and values of grouped-query attention.

Models repeat each head of the keys for the query heads of its group. Ops whose kernel does that itself
(`Code.unrepeated`) take the operand before, so that no copy of it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.ir import Attribute, Function, Module, Op, Size, Value, live_ops, producers
from distir_relax.layout import is_symbolic
from distir_relax.ops import Trait, lookup


@dataclass(frozen=True, slots=True)
class SkipRepeats:
    """Pass: ranked stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("ranked",)
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Let ops of every function take operands before they are repeated, with attribute ``grouped``."""
        return replace(module, functions=tuple(map(_without_repeats, module.functions)))


def _without_repeats(function: Function) -> Function:
    made_by = producers(function)
    ops = []
    for op in function.ops:
        numbers = () if op.callee else lookup(op.name, op.location).code.unrepeated
        found = [operand_before_repeat(op.operands[n], made_by) for n in numbers]
        before = dict(zip(numbers, (repeat[0] for repeat in found if repeat), strict=False))
        if found and None not in found and len({repeat[1] for repeat in found if repeat}) == 1:
            assert found[0] is not None
            repeats = found[0][1]
            operands = tuple(before.get(n) or value for n, value in enumerate(op.operands))
            attrs: dict[str, Attribute] = {**op.attrs, "grouped": True}
            op = replace(
                op, operands=operands, attrs=attrs if len(set(repeats)) == 1 else {**attrs, "repeats": repeats}
            )
        ops.append(op)
    changed = replace(function, ops=tuple(ops))
    return function if changed.ops == function.ops else replace(changed, ops=live_ops(changed, has_effects))


def operand_before_repeat(value: Value, made_by: Mapping[str, Op]) -> tuple[Value, tuple[int, ...]] | None:
    """Return the value (b, h, ...) whose elements along dim 1 are each repeated in a row, and how often each is.

    Equal numbers come from a broadcast: of one element, or of several along a new dim, which is joined with dim 1 after
    it. None for a value that is not repeated.
    """
    last = made_by.get(value.name)
    repeats = None if last is None or last.callee else lookup(last.name, last.location).code.repeats
    if last is not None and repeats is not None:
        axis, counts = repeats(last.attrs)
        return (last.operands[0], counts) if axis == 1 else None
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
            return value, (shapes[0][1],)
    repeated, spread, alone, before = shapes
    if len(before) < 2 or len(spread) != len(before) + 1 or is_symbolic((before[1], spread[2])) or not before[1]:
        return None
    rest = before[2:]
    is_repeat = alone == (before[0], before[1], 1, *rest) and spread == (before[0], before[1], spread[2], *rest)
    if not is_repeat or repeated != (before[0], before[1] * spread[2], *rest):
        return None
    return value, (spread[2],) * before[1]


def _is_broadcast_of_one(after: Sequence[Size], before: Sequence[Size]) -> bool:
    """Return whether these shapes differ in dim 1 alone, which has one element before."""
    return (
        len(before) == len(after) > 1
        and (*before[:1], *before[2:]) == (*after[:1], *after[2:])
        and before[1] == 1 != after[1]
        and not is_symbolic((after[1],))
    )


def has_effects(op: Op) -> bool:
    """Return whether an op stays though nothing uses its results: other ranks wait for it, or a function does."""
    return bool(op.callee) or Trait.COMMUNICATES in lookup(op.name, op.location).traits
