"""Models of several of the validations: a gated feed-forward network, and an encoder of patches; and a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def next_words(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of a model of transformers over all words, which its labels are."""
    return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


class Gated(nn.Module):
    """A gated feed-forward layer after a norm, added to its input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Layer(nn.Module):
    """A layer of an encoder: attention to all positions and a feed-forward, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.first(x)
        parts = (p(y).view(rows, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Encoder(nn.Module):
    """Layers on patches, and classes from the mean over all positions."""

    def __init__(self, layers: Iterable[nn.Module], width: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(patch, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x)
        classes: torch.Tensor = self.head(x.mean(1))
        return classes
