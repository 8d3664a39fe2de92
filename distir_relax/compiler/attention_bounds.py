"""Bounds of attention in imported models, in place of masks that are functions of positions, or constants."""

from __future__ import annotations

from dataclasses import replace

from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Function, Op, TensorType, Value
from distir_relax.kernels.attention import bounds_of_mask
from distir_relax.lowering.ranked.bound_attention import BoundAttention, is_mask, with_bounds
from distir_relax.ops import lookup


def bound_attention(imported: Imported) -> Imported:
    """Return a model whose attention takes the first and the last key of each row, where its masks allow that.

    No later stage has the masks then: they are not sharded, not stored, and not simulated.
    """
    import torch

    main, tensors = imported.module.main, dict(imported.tensors)
    found: dict[str, Value] = {}
    for item in main.inputs:
        name, data = item.value.name, tensors.get(item.value.name)
        # Others have a name for users.
        is_own = item.role == "constant" and name not in imported.names.values()
        if is_own and type(data) is torch.Tensor and not data.is_meta and _is_mask_alone(main, item.value):
            bounds = bounds_of_mask(data)
            if bounds is not None:
                tensors[name] = bounds
                found[name] = Value(name, TensorType(tuple(bounds.shape), "int64"))
    inputs = tuple(replace(item, value=found.get(item.value.name, item.value)) for item in main.inputs)
    changed = replace(main, inputs=inputs, ops=tuple(_with_bounds(op, found) for op in main.ops))
    module = replace(imported.module, functions=(changed, *imported.module.functions[1:]))
    return replace(imported, module=BoundAttention().run(module), tensors=tensors)


def _with_bounds(op: Op, found: dict[str, Value]) -> Op:
    return with_bounds(op, [found.get(v.name, v) for v in op.operands]) if found else op


def _is_mask_alone(function: Function, value: Value) -> bool:
    """Return whether a value is a boolean mask of attention, and nothing else."""
    if not is_mask(value):
        return False
    users = [(op, number) for op in function.ops for number, v in enumerate(op.operands) if v.name == value.name]
    is_alone = all(not op.callee and lookup(op.name, op.location).code.mask == number for op, number in users)
    is_output = any(output.value.name == value.name for output in function.outputs)
    return is_alone and not is_output and bool(users)
