"""Import of models of any kind: dispatch to the frontend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.dynamic_shapes import DimSpec
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.program import import_program
from distir_relax.ir import Module


def import_model(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    input_shapes: Mapping[str, Sequence[int]] | None,
    params: Mapping[str, Any] | Sequence[Any] | None,
    check: bool,
    dynamic_shapes: DimSpec | None = None,
    dims: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Imported:
    """Import a model as `compile` takes it, by the frontend of its kind.

    Raises `ImportModelError` for other objects, for arguments of another kind of model, and what the frontend raises.
    """
    kinds = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
    if params is not None and "tvm.IRModule" not in kinds:
        raise ImportModelError(
            f"params are for TVM modules, found {type(model).__name__}", hint="the model has its own"
        )
    if constants and not kinds & {"torch.Module", "onnx.ModelProto", "builtins.str", "pathlib.Path"}:
        raise ImportModelError(f"constants are for torch and ONNX models, found {type(model).__name__}")
    if "tvm.IRModule" in kinds:
        from distir_relax.frontends.relax import import_relax

        if dynamic_shapes:
            raise ImportModelError(
                "a TVM module has its own symbolic dims", hint="dims={name: (low, high)} bounds them"
            )
        return import_relax(model, params=params, input_shapes=input_shapes, dims=dims)
    if isinstance(model, (str, Path)) or "onnx.ModelProto" in kinds:
        from distir_relax.frontends.onnx.importer import import_onnx

        if args or kwargs:
            raise ImportModelError("an ONNX model takes input_shapes, not an example call")
        if dynamic_shapes:
            raise ImportModelError(
                "dynamic_shapes are for torch models, found an ONNX model",
                hint="its open dims are symbolic, and dims={name: (low, high)} bounds them",
            )
        return import_onnx(model, input_shapes, dims, constants)
    if input_shapes:
        raise ImportModelError(
            f"input_shapes are for ONNX and TVM models, found {type(model).__name__}", hint="give example_inputs"
        )
    if "torch.Module" in kinds:
        from distir_relax.frontends.torch.importer import import_torch

        return import_torch(
            model, tuple(args), kwargs, check, dynamic_shapes=dynamic_shapes, dims=dims, constants=constants
        )
    if isinstance(model, tuple) and model and isinstance(model[0], Module):
        return import_program(model[0], model[1] if len(model) > 1 else {})
    raise ImportModelError(
        f"expected a torch.nn.Module, a TVM IRModule or an ONNX model, found {type(model).__name__}",
        hint="for a file, build the model in a function and name it: distir compile model.py:build",
    )
