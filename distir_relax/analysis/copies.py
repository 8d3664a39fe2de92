"""Copies of tensors that are not contiguous: made by reshapes, and by kernels that need contiguous operands.

torch keeps strides: a reshape of a transposed or broadcast tensor has memory of its own. Inputs of functions are taken
as contiguous. So are results, except those of views, and of elementwise ops, which keep the order of their operand's
dims in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.ir import Function, Op
from distir_relax.ops import Trait, lookup
from distir_relax.ops.movement.view_strides import contiguous


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that depend on strides: the names of views that are copies, and operands copied by the op that reads them.

    `operands` has the numbers of those operands, by the name of the op's first result.
    """

    views: frozenset[str]
    operands: Mapping[str, tuple[int, ...]]


NO_COPIES = Copies(frozenset(), {})


def layout_copies(function: Function) -> Copies:
    """Find the copies made in a function of the distributed stage, by the strides of the first device's shards."""
    strides: dict[str, tuple[int, ...]] = {}
    copies: set[str] = set()
    operands: dict[str, tuple[int, ...]] = {}
    for op in function.ops:
        if op.callee or not op.operands:
            continue
        entry = lookup(op.name, op.location)
        copied = tuple([i for i in entry.cost.contiguous if op.operands[i].name in strides])
        if copied:
            operands[op.results[0].name] = copied
        first = op.operands[0]
        known = strides.get(first.name)
        rule = entry.code.strides
        if rule is None:
            if known is not None and Trait.POINTWISE in entry.traits:
                _keep_order(op, known, strides)
            continue
        shape = first.placed.local(0).shape
        before = known or contiguous(shape)
        for value in op.results:
            new = value.placed.local(0).shape
            found = rule(shape, before, op.attrs, new)
            if found is None:
                copies.add(value.name)
            elif found != contiguous(new):
                strides[value.name] = found
    return Copies(frozenset(copies), operands)


def _keep_order(op: Op, known: tuple[int, ...], strides: dict[str, tuple[int, ...]]) -> None:
    """An elementwise op on a transposed tensor gives a transposed one, without gaps."""
    result = op.results[0].placed.local(0).shape
    if op.operands[0].placed.local(0).shape != result:
        return
    found, step = [0] * len(known), 1
    for dim in _fastest_first(result, known):
        found[dim] = step
        step *= max(result[dim], 1)
    if tuple(found) != contiguous(result):
        strides[op.results[0].name] = tuple(found)


def _fastest_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dims in the order in which torch lays out the result of an elementwise op.

    An insertion sort by strides, in which a stride of 0 compares with none (``reorder_dimensions`` in
    ``aten/src/ATen/TensorIterator.cpp``).
    """
    order = list(reversed(range(len(shape))))
    for end in range(1, len(order)):
        place = end
        for other in reversed(range(end)):
            a, b = order[other], order[place]
            if not strides[a] or not strides[b]:
                continue
            if strides[a] < strides[b]:
                break
            if strides[a] > strides[b] or shape[a] > shape[b]:
                order[other], order[place] = b, a
                place = other
    return order
