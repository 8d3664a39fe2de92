"""Import of programs of the global stage, parsed or from another frontend, with their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.arguments import as_tensor, named_arguments
from distir_relax.ir import Module, TensorType

if TYPE_CHECKING:
    import torch


def import_program(module: Module, tensors: Mapping[str, Any]) -> Imported:
    """Import a program of the global stage. `tensors` are its parameters and constants by name.

    A call takes the inputs by position or by name, and returns the output, or a dict of several outputs. Raises
    `ImportModelError` for a program of another stage, and if a tensor is missing or of another type.
    """
    if module.stage != "global":
        raise ImportModelError(
            f"expected a program of the global stage to compile, found the {module.stage} stage",
            hint="return the model itself, or a program of the distributed stage with the layouts of its inputs",
        )
    data: dict[str, torch.Tensor] = {}
    for item in module.main.inputs:
        if item.role == "input":
            continue
        name = item.value.name
        if name not in tensors:
            raise ImportModelError(f"expected a tensor for the {item.role} {name!r}, found none")
        data[name] = as_tensor(tensors[name])
        kind = TensorType(tuple(data[name].shape), str(data[name].dtype).removeprefix("torch."))
        if kind != item.value.tensor:
            raise ImportModelError(f"expected {item.value.type} for the {item.role} {name!r}, found {kind}")
    inputs = [item.value.name for item in module.main.inputs if item.role == "input"]
    return Imported(
        module=module,
        tensors=data,
        names={item.value.name: item.value.name for item in module.main.inputs},
        flatten=lambda args, kwargs: named_arguments(f"@{module.main.name}", inputs, args, kwargs),
        rebuild=lambda outputs: next(iter(outputs.values())) if len(module.main.outputs) == 1 else dict(outputs),
    )
