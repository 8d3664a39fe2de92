"""Import of models with weights and activations in the dtype of a precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distir_relax.compiler.options import ImportOptions
from distir_relax.errors import DistIRError
from distir_relax.frontends.import_model import import_model
from distir_relax.frontends.imported_model import Imported, match_parameters
from distir_relax.frontends.precision import has_precision, precision_dtype, with_precision
from distir_relax.precision import convert_program, keep_weights, with_call_dtypes
from distir_relax.support.precisions import PRECISIONS
from distir_relax.support.torch_compat import tree_map

if TYPE_CHECKING:
    import torch


def import_in_precision(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, name: str, options: ImportOptions
) -> Imported:
    """Import the model `name` as `import_model` does, in the precision of `options` if that is one of `PRECISIONS`.

    Inputs and outputs keep their dtypes. Raises what `import_model` and `match_parameters` raise.
    """
    dtype, keep = PRECISIONS.get(options.get("precision") or ""), options.get("keep", ())
    if dtype is not None and is_torch(model):
        return _import_converted(model, args, kwargs, name, options)
    imported = _import(model, args, kwargs, options)
    if dtype is None:
        return imported
    kept = {value: imported.tensors[value] for value in match_parameters(imported, keep, "keep", name)}
    return keep_weights(convert_program(imported, dtype), kept)


def is_torch(model: Any) -> bool:
    """Return whether a model is a torch module; torch need not be imported."""
    return any(f"{kind.__module__.split('.')[0]}.{kind.__name__}" == "torch.Module" for kind in type(model).__mro__)


def keep_parameters(imported: Imported, model: torch.nn.Module, keep: Sequence[str], name: str) -> Imported:
    """Return a converted model with the parameters of the original `model` that match a pattern of `keep`."""
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = match_parameters(imported, keep, "keep", name)
    return keep_weights(imported, {v: named[n] for n, v in imported.names.items() if v in kept and n in named})


def _import_converted(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, name: str, options: ImportOptions
) -> Imported:
    """Import a torch module that is converted first, whose own code chooses the ops in float32."""
    precision = options["precision"] or ""
    keep = options.get("keep", ())
    if has_precision(model, precision):
        imported = _import(model, args, kwargs, options)
        match_parameters(imported, keep, "keep", name)
        return imported
    cast_args, cast_kwargs = tree_map(
        partial(_cast, dtype=precision_dtype(precision)), (tuple(args), dict(kwargs or {}))
    )
    converted = with_precision(model, precision)
    try:
        imported = _import(converted, cast_args, cast_kwargs, options)
    except DistIRError:
        # The model may not run with computed buffers of another dtype than its weights.
        everything = with_precision(converted, precision, all_buffers=True)
        if everything is converted:
            raise
        imported = _import(everything, cast_args, cast_kwargs, options)
    original = imported.flatten(tuple(args), kwargs or {})
    inputs = {key: str(x.dtype).removeprefix("torch.") for key, x in original.items() if x.is_floating_point()}
    # New values of state, which are outputs as well, stay as they are.
    results = {*imported.results, *imported.written}
    outputs = {
        output.name: "float32"
        for output in imported.module.main.outputs
        if output.name in results and output.value.tensor.dtype == "bfloat16"
    }
    return with_call_dtypes(keep_parameters(imported, model, keep, name), inputs, outputs)


def _import(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: ImportOptions) -> Imported:
    return import_model(
        model,
        args,
        kwargs,
        options.get("input_shapes"),
        options.get("params"),
        options.get("check_import", True),
        options.get("dynamic_shapes"),
        options.get("dims"),
        options.get("constants"),
    )


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    import torch

    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
