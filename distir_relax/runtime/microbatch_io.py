"""Splitting of inputs into microbatches, and concatenation of the outputs of microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from distir_relax.bundle import Division, Manifest, Tensor
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import as_torch
from distir_relax.runtime.inputs import check_inputs

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


def user_inputs(manifest: Manifest) -> list[Tensor]:
    """Return the inputs that users pass, before the split into microbatches, in the manifest's order."""
    return _join_parts(manifest.inputs, manifest.divided_inputs)


def user_outputs(manifest: Manifest) -> list[Tensor]:
    """Return the outputs that users get, after microbatches are concatenated, in the manifest's order."""
    return _join_parts(manifest.outputs, manifest.divided_outputs)


def in_parts(manifest: Manifest, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Check the user's inputs and split them into microbatches; inputs that are already split are returned as they are.

    Raises RunError for an input that is missing, unknown, no array, or of another dtype or shape.
    """
    parts = {part for division in manifest.divided_inputs for part in division.parts if part in inputs}
    check_inputs(manifest.inputs if parts else user_inputs(manifest), inputs)
    arrays = dict(inputs)
    tensors = {tensor.name: tensor for tensor in manifest.inputs}
    for division in () if parts else manifest.divided_inputs:
        sizes = [tensors[name].shape[division.dim] for name in division.parts]
        tensor = as_torch(arrays.pop(division.name))
        for name, size, end in zip(division.parts, sizes, accumulate(sizes), strict=True):
            arrays[name] = tensor.narrow(division.dim, end - size, size)
    return arrays


def parts_of(manifest: Manifest, outputs: Collection[str] | None) -> list[str] | None:
    """Return the program outputs of the user outputs; None is all. Raises RunError for unknown ones."""
    if outputs is None:
        return None
    divided = {division.name: division.parts for division in manifest.divided_outputs}
    parts = [part for name in outputs for part in divided.get(name, (name,))]
    available = {tensor.name for tensor in manifest.outputs}
    for name in parts:
        if name not in available:
            names = [tensor.name for tensor in user_outputs(manifest)]
            shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
            raise RunError("the program has no such output", f"output {name!r}", f"it gives {shown}")
    return parts


def joined(manifest: Manifest, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate the parts of divided outputs."""
    import torch

    for division in manifest.divided_outputs:
        if all(name in outputs for name in division.parts):
            outputs[division.name] = torch.cat([outputs.pop(name) for name in division.parts], division.dim)
    return outputs


def _join_parts(tensors: Sequence[Tensor], divisions: Sequence[Division]) -> list[Tensor]:
    parts = {part: division for division in divisions for part in division.parts}
    sizes = {tensor.name: tensor.shape for tensor in tensors}
    undivided: dict[str, Tensor] = {}
    for tensor in tensors:
        division = parts.get(tensor.name)
        if division is not None:
            size = sum(sizes[part][division.dim] for part in division.parts)
            shape = (*tensor.shape[: division.dim], size, *tensor.shape[division.dim + 1 :])
            tensor = replace(tensor, name=division.name, shape=shape, shards=())
        undivided.setdefault(tensor.name, tensor)
    return list(undivided.values())
