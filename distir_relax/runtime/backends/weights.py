"""What a rank holds of the weights, for every backend."""

from __future__ import annotations

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
