"""Copies of non-contiguous tensors: by reshapes, and by kernels that need contiguous operands.

torch preserves strides, so a reshape of a transposed or broadcast tensor is a copy. Inputs of functions are assumed to
be contiguous. So are results, except those of views, and of elementwise ops and others that keep the order of their
operand's dims in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distir_relax.ir import Function, Op
from distir_relax.ops import contiguous, lookup


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that depend on strides: names of views that are copies, and operands copied by the op that reads them.

    `operands` maps the op's first result to the numbers of those operands.
    """

    views: frozenset[str]
    operands: Mapping[str, tuple[int, ...]]


NO_COPIES = Copies(frozenset(), {})


def layout_copies(function: Function) -> Copies:
    """Find the copies in a function of the distributed stage, from the strides of the first device's shards."""
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
        operand_strides = strides.get(first.name)
        rule = entry.code.strides
        if rule is None:
            if operand_strides is not None and entry.keeps_order:
                _keep_order(op, operand_strides, strides)
            continue
        shape = first.placed.local(0).shape
        source_strides = operand_strides or contiguous(shape)
        for value in op.results:
            new = value.placed.local(0).shape
            result_strides = rule(shape, source_strides, op.attrs, new)
            if result_strides is None:
                copies.add(value.name)
            elif result_strides != contiguous(new):
                strides[value.name] = result_strides
    return Copies(frozenset(copies), operands)


def _keep_order(op: Op, operand_strides: tuple[int, ...], strides: dict[str, tuple[int, ...]]) -> None:
    """Set the strides of an elementwise result: dense, in the order of the operand's dims."""
    result = op.results[0].placed.local(0).shape
    if op.operands[0].placed.local(0).shape != result:
        return
    result_strides, step = [0] * len(operand_strides), 1
    for dim in _fastest_first(result, operand_strides):
        result_strides[dim] = step
        step *= max(result[dim], 1)
    if tuple(result_strides) != contiguous(result):
        strides[op.results[0].name] = tuple(result_strides)


def _fastest_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the dims in the memory order of an elementwise result in torch.

    An insertion sort by strides, where a stride of 0 is not comparable (``reorder_dimensions`` in
    ``aten/src/ATen/TensorIterator.cpp``).
    """
    order = list(reversed(range(len(shape))))
    for end in range(1, len(order)):
        position = end
        for other in reversed(range(end)):
            a, b = order[other], order[position]
            if not strides[a] or not strides[b]:
                continue
            if strides[a] < strides[b]:
                break
            if strides[a] > strides[b] or shape[a] > shape[b]:
                order[other], order[position] = b, a
                position = other
    return order
