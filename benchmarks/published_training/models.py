"""GPT as the published systems train it, on the meta device.

Learned positions, biases, layer norm before attention and before the feed-forward net of four times the width, GELU. It
computes in bfloat16; weights, gradients and AdamW's state are float32.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr


def gpt(layers: int, width: int, heads: int, words: int, sequence: int, batch: int, is_fused: bool) -> dr.Training:
    """Return a step of training on `batch` sequences; `is_fused`: attention is one kernel."""
    with torch.device("meta"):
        model = GPT(layers, width, heads, words, sequence, is_fused)
        ids, labels = (torch.zeros(batch, sequence, dtype=torch.int64) for _ in range(2))
    return dr.Training(
        model, token_loss, dr.optim.AdamW(lr=1e-4), (ids, labels), precision="bf16-true", reduce_dtype="bf16"
    )


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class GPT(nn.Module):
    """Token numbers (batch, sequence) to logits (batch, sequence, words)."""

    def __init__(self, layers: int, width: int, heads: int, words: int, sequence: int, is_fused: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(sequence, width)
        self.layers = nn.ModuleList(Layer(width, heads, is_fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token's successor."""
        x = self.words(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    """Attention and a feed-forward net, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states to hidden states, both (batch, sequence, width)."""
        h = self.before(x)
        q, k, v = (
            part(h).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.is_fused else _attend(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend by two products and a softmax.

    Megatron-LM's softmax kernel scales and masks as well, so neither is an op here.
    """
    return torch.softmax(q @ k.transpose(2, 3), dim=-1) @ v
