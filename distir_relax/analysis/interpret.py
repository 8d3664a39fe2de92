"""The reference executor: runs a program of the global stage op by op, on real tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.errors import RunError
from distir_relax.ir import Function, TensorType
from distir_relax.ops import evaluate

if TYPE_CHECKING:
    import torch


def interpret(function: Function, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of `function` by output name.

    `inputs` holds a tensor for each of the function's inputs, parameters and constants included, by value name.
    Raises `RunError` when one is missing or is not of the declared shape and dtype.
    """
    values: dict[str, torch.Tensor] = {}
    last_use = {v.name: i for i, op in enumerate(function.ops) for v in op.operands}
    kept = {output.value.name for output in function.outputs}
    for item in function.inputs:
        name = item.value.name
        if name not in inputs:
            raise RunError(f"expected a tensor for {item.role} {name!r}, found none")
        found = TensorType(tuple(inputs[name].shape), str(inputs[name].dtype).removeprefix("torch."))
        if found != item.value.type:
            raise RunError(f"expected {item.value.type} for {item.role} {name!r}, found {found}")
        values[name] = inputs[name]
    for position, op in enumerate(function.ops):
        results = evaluate(op, [values[v.name] for v in op.operands])
        values.update(zip((v.name for v in op.results), results, strict=True))
        for name in {v.name for v in op.operands}:
            if last_use[name] == position and name not in kept:
                del values[name]
    return {output.name: values[output.value.name] for output in function.outputs}
