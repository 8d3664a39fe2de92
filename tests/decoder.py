"""A language model of one block, whose text at every stage is short."""

from __future__ import annotations

import torch


class Decoder(torch.nn.Module):
    """Attention of three heads, and a feed-forward layer of 127 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(61, 12), torch.nn.Linear(12, 61, bias=False)
        self.attention, self.out = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)
        self.up, self.down = torch.nn.Linear(12, 127), torch.nn.Linear(127, 12)
        self.norm = torch.nn.LayerNorm(12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.attention(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        scores: torch.Tensor = self.head(x)
        return scores
