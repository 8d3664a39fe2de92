"""Weights of one rank, and alias checks of its results, for all backends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, local_intervals

if TYPE_CHECKING:
    import torch


def load_weights(bundle: Bundle, rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return this rank's shards of the weights, by name."""
    manifest = bundle.manifest
    weights = {
        tensor.name: bundle.weights.read(tensor.name, local_intervals(tensor, manifest.mesh, rank)).to(device)
        for tensor in manifest.weights
        if tensor.is_on(rank)
    }
    # Updated weights are copied: the bundle's tensors may be shared with other ranks, and belong to the user.
    return {name: weight.clone() if name in manifest.updates else weight for name, weight in weights.items()}


def memory(tensors: Iterable[torch.Tensor | None]) -> frozenset[int]:
    """Return the addresses of the storages of tensors, whatever part of them they view; None has none."""
    import torch

    # Packed weights are opaque objects and never results.
    plain = (t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.numel())
    return frozenset(t.untyped_storage().data_ptr() for t in plain)


def own_memory(
    results: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor], reserved: Collection[int]
) -> list[torch.Tensor]:
    """Return `results`, copying those that alias the `inputs` or one of the addresses `reserved`.

    A program may return a weight, a state or an input unchanged; its caller may write into the results.
    """
    shared = memory(inputs).union(reserved)
    return [result.clone() if memory([result]) & shared else result for result in results]
