"""A model with state: its buffer is updated by every call."""

from __future__ import annotations

import torch

import distir_relax as dr
from distir_relax import annotate_sharding


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 5))
        self.register_buffer("count", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = x @ annotate_sharding(self.weight, dr.DeviceMesh((3,), ("tp",)), "S[0]")
        return y + self.count.sum()
