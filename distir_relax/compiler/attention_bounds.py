"""Bounds of attention in imported models, in place of masks that are functions of positions, or constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Function, Op, TensorType, Value
from distir_relax.kernels.attention import bounds_of_mask
from distir_relax.layout.symbolic_size import Size
from distir_relax.lowering.ranked.bound_attention import (
    bounded_module,
    bounds_op,
    density_of,
    is_mask,
    joined,
    with_bounds,
)
from distir_relax.ops import lookup
from distir_relax.ops.table import Element
from distir_relax.ops.table.index_expression import all_of, compared, index_of, reindexed_number

if TYPE_CHECKING:
    import torch


def bound_attention(imported: Imported) -> Imported:
    """Return a model whose attention takes the first and the last key of each row, where its masks allow that.

    No later stage has the masks then: they are not sharded, not stored, and not simulated.
    """
    import torch

    main, tensors = imported.module.main, dict(imported.tensors)
    found, densities, formulas = dict[str, Value](), dict[str, float | None](), list[Op]()
    for item in main.inputs:
        name, data = item.value.name, tensors.get(item.value.name)
        # Others have a name for users.
        is_own = item.role == "constant" and name not in imported.names.values()
        if is_own and type(data) is torch.Tensor and not data.is_meta and _is_mask_alone(main, item.value):
            bounds = bounds_of_mask(data)
            if bounds is not None:
                tensors[name] = bounds
                found[name] = Value(name, TensorType(tuple(bounds.shape), "int64"))
                densities[name] = density_of(bounds.numpy(), data.shape[-1])
                if (formula := _formula(bounds)) is not None:
                    formulas.append(bounds_op(found[name], formula, item.location))
                    del tensors[name]
    computed = {op.results[0].name for op in formulas}
    inputs = tuple(
        replace(item, value=found.get(item.value.name, item.value))
        for item in main.inputs if item.value.name not in computed
    )  # fmt: skip
    ops = (*formulas, *(_with_bounds(op, found, densities) for op in main.ops))
    changed = replace(main, inputs=inputs, ops=ops)
    module = replace(imported.module, functions=(changed, *imported.module.functions[1:]))
    constants = {item.value.name: tensors.get(item.value.name) for item in inputs if item.role == "constant"}
    known = {name: element for name, data in constants.items() if (element := _element(data)) is not None}
    module = bounded_module(module, known)
    used = {v.name for op in module.main.ops for v in op.operands} | {o.value.name for o in module.main.outputs}
    unused = known.keys() - used - {*imported.names.values()}
    inputs = tuple(item for item in module.main.inputs if item.value.name not in unused)
    module = replace(module, functions=(replace(module.main, inputs=inputs), *module.functions[1:]))
    return replace(imported, module=module, tensors={name: x for name, x in tensors.items() if name not in unused})


def _with_bounds(op: Op, found: Mapping[str, Value], densities: Mapping[str, float | None]) -> Op:
    return with_bounds(op, [found.get(v.name, v) for v in op.operands], densities) if found else op


def _formula(bounds: torch.Tensor) -> str | None:
    """Return bounds as an element of ``indexed``, if each of both is a line, up to a number that it does not cross."""
    firsts, ends = _lines(bounds[:, 0], is_first=True), _lines(bounds[:, 1], is_first=False)
    if firsts is None or ends is None:
        return None
    first, end = joined("max", firsts), joined("min", ends)
    return f"i1 * ({end})" if first == "0" else f"(1 - i1) * ({first}) + i1 * ({end})"


def _lines(numbers: torch.Tensor, is_first: bool) -> list[Size] | None:
    """Return functions of ``i0``, of which the largest, or for ends the smallest, are these numbers."""
    import torch

    rows = torch.arange(len(numbers))
    start, last = int(numbers[0]), int(numbers[-1])
    if start == last:
        return [start] if bool((numbers == start).all()) else None
    # Windows begin with the first key, and end with the last one.
    offset, limit = (last - len(numbers) + 1, start) if is_first else (start, last)
    line = rows + offset
    if torch.equal(numbers, line):
        return [index_of(0) + offset]
    bent = line.clamp(min=limit) if is_first else line.clamp(max=limit)
    return [index_of(0) + offset, limit] if torch.equal(numbers, bent) else None


def _element(data: Any) -> Element | None:
    """Return a constant as an element of its indices: consecutive numbers along a dim, or a mask that is a formula."""
    import torch

    if type(data) is not torch.Tensor or data.is_meta or not data.numel():
        return None
    if data.dtype == torch.bool:
        return _element_of_mask(data) if data.dim() > 1 else None
    count, first = data.numel(), data.flatten()[0]
    if data.dtype != torch.int64 or count not in (1, *data.shape):
        return None
    along = index_of(data.shape.index(count)) if count > 1 else 0
    return along + int(first) if torch.equal(data.flatten(), torch.arange(count) + first) else None


def _element_of_mask(data: torch.Tensor) -> Element | None:
    bounds = bounds_of_mask(data)
    firsts, ends = (None, None) if bounds is None else (_lines(x, n == 0) for n, x in enumerate(bounds.T))
    if firsts is None or ends is None:
        return None
    row, key = (index_of(data.dim() - n) for n in (2, 1))
    first, end = ([reindexed_number(x, [row]) for x in numbers] for numbers in (firsts, ends))
    above, below = (compared(x, "<=", key, data.shape) for x in first), (compared(key, "<", x, data.shape) for x in end)
    return all_of([*above, *below])


def _is_mask_alone(function: Function, value: Value) -> bool:
    """Return whether a value is a boolean mask of attention, and nothing else."""
    if not is_mask(value):
        return False
    users = [(op, number) for op in function.ops for number, v in enumerate(op.operands) if v.name == value.name]
    is_alone = all(not op.callee and lookup(op.name, op.location).code.mask == number for op, number in users)
    is_output = any(output.value.name == value.name for output in function.outputs)
    return is_alone and not is_output and bool(users)
