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


def whole_inputs(manifest: Manifest) -> list[Tensor]:
    """Return the undivided inputs, as users pass them, in the manifest's order."""
    return _whole(manifest.inputs, manifest.divided_inputs)


def whole_outputs(manifest: Manifest) -> list[Tensor]:
    """Return the undivided outputs, as users get them, in the manifest's order."""
    return _whole(manifest.outputs, manifest.divided_outputs)


def in_parts(manifest: Manifest, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Check the whole inputs and split them for the programs; inputs that are already split stay so.

    Raises RunError for an input that is missing, unknown, no array, or of another dtype or shape.
    """
    given = {part for division in manifest.divided_inputs for part in division.parts if part in inputs}
    check_inputs(manifest.inputs if given else whole_inputs(manifest), inputs)
    found = dict(inputs)
    known = {tensor.name: tensor for tensor in manifest.inputs}
    for division in () if given else manifest.divided_inputs:
        sizes = [known[name].shape[division.dim] for name in division.parts]
        tensor = as_torch(found.pop(division.name))
        for name, size, end in zip(division.parts, sizes, accumulate(sizes), strict=True):
            found[name] = tensor.narrow(division.dim, end - size, size)
    return found


def parts_of(manifest: Manifest, outputs: Collection[str] | None) -> list[str] | None:
    """Return the program outputs of the user outputs; None is all. Raises RunError for unknown ones."""
    if outputs is None:
        return None
    known = {division.name: division.parts for division in manifest.divided_outputs}
    found = [part for name in outputs for part in known.get(name, (name,))]
    parts = {tensor.name for tensor in manifest.outputs}
    for name in found:
        if name not in parts:
            names = [tensor.name for tensor in whole_outputs(manifest)]
            shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
            raise RunError("the program has no such output", f"output {name!r}", f"it gives {shown}")
    return found


def joined(manifest: Manifest, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate the parts of divided outputs."""
    import torch

    for division in manifest.divided_outputs:
        if all(name in outputs for name in division.parts):
            outputs[division.name] = torch.cat([outputs.pop(name) for name in division.parts], division.dim)
    return outputs


def _whole(tensors: Sequence[Tensor], divisions: Sequence[Division]) -> list[Tensor]:
    parts = {part: division for division in divisions for part in division.parts}
    sizes = {tensor.name: tensor.shape for tensor in tensors}
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        division = parts.get(tensor.name)
        if division is not None:
            size = sum(sizes[part][division.dim] for part in division.parts)
            shape = (*tensor.shape[: division.dim], size, *tensor.shape[division.dim + 1 :])
            tensor = replace(tensor, name=division.name, shape=shape, shards=())
        found.setdefault(tensor.name, tensor)
    return list(found.values())
