"""Models for searches: functions of a file, as users write them."""

from __future__ import annotations

import torch
from torch import nn

import distir_relax as dr

WIDTH = 127


def run(global_batch: int = 12) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Six layers to be run."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    return model, (torch.randn(global_batch, WIDTH),)


def train(global_batch: int = 12) -> dr.Training:
    """The same to be trained."""
    model, (x,) = run(global_batch)
    return dr.Training(model, lambda output, target: ((output - target) ** 2).mean(), dr.optim.AdamW(), (x, x))


def fixed() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A model with an example of its own."""
    return run(9)
