"""What a rank holds of the weights, for every backend."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, local_intervals

if TYPE_CHECKING:
    import torch


def load_weights(bundle: Bundle, rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """This rank's shards of the weights, by name."""
    manifest = bundle.manifest
    weights = {
        tensor.name: bundle.weights.read(tensor.name, local_intervals(tensor, manifest.mesh, rank)).to(device)
        for tensor in manifest.weights
        if tensor.is_on(rank)
    }
    # What a program changes is its own: the bundle's tensors may be shared with other ranks, and are the user's.
    return {name: weight.clone() if name in manifest.updates else weight for name, weight in weights.items()}


def memory(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The addresses of the memory that tensors lie in, of whatever part of it they are."""
    import torch

    # Packed weights are objects of their own, and no results.
    plain = (t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.numel())
    return frozenset(t.untyped_storage().data_ptr() for t in plain)


def own_memory(
    results: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor], held: Collection[int]
) -> list[torch.Tensor]:
    """`results`, those copied that lie in the memory of the `inputs` or at one of the addresses `held`.

    A program may return a weight, a state or an input as it is; its caller may write into what it is given.
    """
    taken = memory(inputs).union(held)
    return [result.clone() if memory([result]) & taken else result for result in results]
