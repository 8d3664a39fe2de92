"""A model read in: its program, its data, and the way between the model's own call and named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distir_relax.ir import Function, Module

if TYPE_CHECKING:
    import torch

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], "dict[str, torch.Tensor]"]
Rebuild = Callable[["Mapping[str, torch.Tensor]"], Any]


@dataclass(frozen=True)
class Imported:
    """What a frontend gives.

    `module` is a global-stage module with one function, ``main``; its meshes are those that annotations name.
    `tensors` holds the data of each parameter and constant input, by value name; parameters are the model's own
    storage, not copies. `names` leads from every name a user may use for an input or parameter to its value name;
    tied parameters lead to one value. `flatten(args, kwargs)` gives a call's tensors by input name and raises
    `RunError` where the call is unlike the example; `rebuild(outputs)` gives tensors by output name back in the
    structure that the model returns. `values` leads from the model's own names of its tensors to value names, for a
    model that names them (ONNX).
    """

    module: Module
    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, str]
    flatten: Flatten
    rebuild: Rebuild
    values: Mapping[str, str] = field(default_factory=dict)


def live(function: Function) -> Function:
    """The function without ops and inputs that reach no output; the user's inputs all stay."""
    needed = {output.value.name for output in function.outputs}
    ops = []
    for op in reversed(function.ops):
        if any(result.name in needed for result in op.results):
            ops.append(op)
            needed |= {operand.name for operand in op.operands}
    inputs = tuple(item for item in function.inputs if item.role == "input" or item.value.name in needed)
    return Function(function.name, inputs, tuple(reversed(ops)), function.outputs)
