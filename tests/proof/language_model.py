"""A small language model with tied words, and its training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr

WIDTH, WORDS = 12, 19


class Block(nn.Module):
    """Attention of three heads and a feed-forward net, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = (y.view(batch, tokens, 3, 4).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class LanguageModel(nn.Module):
    """Token numbers (batch, tokens) to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


def step(strategy: str, **options: Any) -> dr.Plan:
    """The plan of a training step on 6 sequences of 5 tokens."""
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (6, 5))
    options = {"optimizer": dr.optim.AdamW(1e-3), **options}
    return dr.compile_training(LanguageModel(), next_words, example_batch=(ids, ids), strategy=strategy, **options).plan


def next_words(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
