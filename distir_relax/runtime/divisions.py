"""Inputs and outputs that a program has in parts, one a microbatch: a user gives, and gets, them whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from distir_relax.bundle import Manifest
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import as_torch

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


def in_parts(manifest: Manifest, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs as the programs take them. Raises RunError for one of another shape, or that is no array."""
    found = dict(inputs)
    known = {tensor.name: tensor for tensor in manifest.inputs}
    for division in manifest.divided_inputs:
        sizes = [known[name].shape[division.dim] for name in division.parts]
        if division.name not in found:
            continue
        shape = list(known[division.parts[0]].shape)
        shape[division.dim] = sum(sizes)
        whole = found.pop(division.name)
        if tuple(getattr(whole, "shape", ())) != tuple(shape):
            seen = f"shape {tuple(whole.shape)}" if hasattr(whole, "shape") else repr(whole)
            raise RunError(f"expected shape {tuple(shape)}, found {seen}", f"input {division.name!r}")
        tensor = as_torch(whole)
        for name, size, end in zip(division.parts, sizes, accumulate(sizes), strict=True):
            found[name] = tensor.narrow(division.dim, end - size, size)
    return found


def parts_of(manifest: Manifest, outputs: Collection[str] | None) -> list[str] | None:
    """The outputs that the programs give for those that a user names; None is all."""
    if outputs is None:
        return None
    known = {division.name: division.parts for division in manifest.divided_outputs}
    return [part for name in outputs for part in known.get(name, (name,))]


def joined(manifest: Manifest, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs as the user knows them."""
    import torch

    for division in manifest.divided_outputs:
        if all(name in outputs for name in division.parts):
            outputs[division.name] = torch.cat([outputs.pop(name) for name in division.parts], division.dim)
    return outputs
