"""Inputs and outputs in the dtypes of the user's model, in a program that computes in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distir_relax.frontends.imported_model import Imported
from distir_relax.ir import Function
from distir_relax.layout import assuming
from distir_relax.precision.retype import Retyper


def with_call_dtypes(imported: Imported, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Imported:
    """Return the model with inputs and outputs of other dtypes, by their names, and casts after and before them."""
    with assuming(imported.module.guards):
        function = _with_call_dtypes(imported.module.main, inputs, outputs)
    return replace(imported, module=replace(imported.module, functions=(function,)))


def _with_call_dtypes(main: Function, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Function:
    retyper = Retyper(main)
    for item in main.inputs:
        value = item.value
        dtype = inputs.get(value.name, value.tensor.dtype)
        if dtype != value.tensor.dtype:
            retyper.replace_input(value, dtype)
            new = retyper.value(value)
            retyper.values[value.name] = retyper.cast(new, value.tensor.dtype)
    for op in main.ops:
        retyper.copy(op)
    return retyper.function([outputs.get(o.name, o.value.tensor.dtype) for o in main.outputs])


def restore_call_dtypes(imported: Imported, original: Function) -> Imported:
    """Return the model with the inputs and outputs of `original`, from which its program was converted."""
    inputs = {item.value.name: item.value.tensor.dtype for item in original.inputs if item.role == "input"}
    outputs = {output.name: output.value.tensor.dtype for output in original.outputs}
    return with_call_dtypes(imported, inputs, outputs)
