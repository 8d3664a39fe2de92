"""Low-rank adapters of a model's linear layers. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021."""

from __future__ import annotations

import math
from typing import Any

import torch

from distir_relax.errors import DistIRError

_SCALE = 2.0
"""The factor of adapters: twice the rank by the rank, as is usual."""


class Adapted(torch.nn.Module):
    """A frozen linear layer, and a product of two matrices of a rank; the second is zero at first."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        dtype = base.weight.dtype
        drawn = torch.randn(rank, base.in_features, dtype=dtype)
        self.down = torch.nn.Parameter(drawn / math.sqrt(base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``x W' + b + x A' B'`` times the scale."""
        return self.base(x) + _SCALE * (x @ self.down.T @ self.up.T)


def adapt(model: torch.nn.Module, rank: int) -> None:
    """Freeze a model, and give its linear layers adapters of a rank; a classifier at its end stays as it is.

    Raises `DistIRError` for a model without linear layers.
    """
    model.requires_grad_(False)
    last = getattr(model, "get_output_embeddings", lambda: None)()
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear and child is not last
    ]
    if not found:
        raise DistIRError("expected linear layers, found none", type(model).__name__, "train all weights: rank 0")
    for module, name, child in found:
        setattr(module, name, Adapted(child, rank))


def merge(model: torch.nn.Module) -> None:
    """Add adapters to the weights of the layers that they are of, which take their places."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Adapted):
                with torch.no_grad():
                    child.base.weight += _SCALE * child.up @ child.down
                setattr(module, name, child.base)
