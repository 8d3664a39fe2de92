"""The number of positions of a language model: the size of a table that it looks them up in."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.ir import Function, Module, Op, Size, dependents, inline, required_ops
from distir_relax.ir.symbols import specialize
from distir_relax.lowering.ranked.index_positions import index_elements
from distir_relax.ops.indexing.index_bounds import checked_range
from distir_relax.ops.table import Element, is_number
from distir_relax.ops.table.index_expression import reindexed_number


def position_limit(module: Module, most: int) -> int:
    """Return the largest size of ``sequence``, up to `most`, at which no position is proved to be out of range."""
    module = inline(module)
    main = module.main
    varying = dependents(main, [item.value.name for item in main.inputs])
    checks = [op for op in main.ops if checked_range(op) and op.operands[0].name not in varying]
    if not checks:
        return most
    names = [op.results[0].name for op in checks]
    module = replace(module, functions=(replace(main, ops=tuple(required_ops(main.ops, names)), outputs=()),))

    def is_valid(length: int) -> bool:
        function = specialize(module, {"sequence": length}).main
        elements = index_elements(function)
        return not any(_is_outside(op, elements.get(op.operands[0].name)) for op in _checks(function))

    valid, invalid = 1, most + 1
    if is_valid(most):
        return most
    while invalid - valid > 1:
        middle = (valid + invalid) // 2
        valid, invalid = (middle, invalid) if is_valid(middle) else (valid, middle)
    return valid


def _checks(function: Function) -> list[Op]:
    return [op for op in function.ops if checked_range(op)]


def _is_outside(op: Op, element: Element | None) -> bool:
    """Return whether the first or the last index of all is out of range."""
    bounds = checked_range(op)
    if bounds is None or element is None or not is_number(element):
        return False
    shape = op.operands[0].tensor.shape
    corners: list[Size] = [
        reindexed_number(element, [n - 1 for n in shape]),
        reindexed_number(element, [0] * len(shape)),
    ]
    low, high = bounds
    return any(
        isinstance(x, int) and isinstance(low, int) and isinstance(high, int) and not low <= x < high for x in corners
    )
