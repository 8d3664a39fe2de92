"""Weights that stay in float32 in a program of bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Function
from distir_relax.layout import assuming
from distir_relax.precision.retype import Retyper

if TYPE_CHECKING:
    import torch


def keep_weights(imported: Imported, weights: Mapping[str, torch.Tensor]) -> Imported:
    """Return the model with these `weights`, by value name, in float32.

    An op that uses one computes in float32: its other operands of bfloat16 are cast, and its results cast back. Results
    of weights alone, such as a transposed one, count as weights.
    """
    import torch

    with assuming(imported.module.guards):
        main = _keep(imported.module.main, weights)
    tensors = {**imported.tensors, **{name: data.detach().to(torch.float32) for name, data in weights.items()}}
    return replace(imported, module=replace(imported.module, functions=(main,)), tensors=tensors)


def _keep(main: Function, weights: Mapping[str, torch.Tensor]) -> Function:
    retyper = Retyper(main)
    computed = {item.value.name for item in main.inputs if item.role in ("input", "state")}
    for item in main.inputs:
        if item.value.name in weights:
            retyper.replace_input(item.value, "float32")
    for op in main.ops:
        operands = [retyper.value(value) for value in op.operands]
        is_computed = any(value.name in computed for value in op.operands)
        if is_computed:
            computed.update(value.name for value in op.results)
        if all(new.type == old.type for new, old in zip(operands, op.operands, strict=True)):
            retyper.copy(op)
            continue
        wide = [retyper.cast(v, "float32") if v.tensor.dtype == "bfloat16" else v for v in operands]
        retyper.emit(op, wide, dtypes=[value.tensor.dtype for value in op.results] if is_computed else ())
    return retyper.function([output.value.tensor.dtype for output in main.outputs])
