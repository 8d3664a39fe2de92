"""Llama 3 405B as it is trained, on the meta device: what a search over 1,024 GPUs begins with.

    distir search benchmarks/llama.py:llama_405b --devices 1024 --profile dgx-h100:128 --global-batch 1024 --by-steps

Sizes are those of table 3 of Llama Team, The Llama 3 Herd of Models, 2024: 126 layers of width 16384, 128 heads, 8 of
them with keys and values, 53248 hidden units, 128256 words, sequences of 8192 tokens. It computes in bfloat16; weights,
gradients and AdamW's state are float32. Plain torch: what transformers exports has a mask of all pairs of tokens.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr

TOKENS = 8192


def llama_405b(global_batch: int = 1024) -> dr.Training:
    """A step of training on `global_batch` sequences."""
    return llama(126, 16384, 128, 8, 53248, 128256, global_batch)


def llama_8b(global_batch: int = 64) -> dr.Training:
    """The same of 32 layers of width 4096."""
    return llama(32, 4096, 32, 8, 14336, 128256, global_batch)


def llama(
    layers: int, width: int, heads: int, key_heads: int, hidden: int, words: int, batch: int, tokens: int = TOKENS
) -> dr.Training:
    """A step of training a Llama of these sizes, on `batch` sequences."""
    with torch.device("meta"):
        model = Llama(layers, width, heads, key_heads, hidden, words)
        ids, labels = (torch.zeros(batch, tokens, dtype=torch.int64) for _ in range(2))
    return dr.Training(model, next_words, dr.optim.AdamW(lr=8e-5), (ids, labels), precision="bf16-true")


def next_words(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens; the labels are the words that come next."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Llama(nn.Module):
    """Token numbers (batch, tokens) to logits (batch, tokens, words)."""

    def __init__(self, layers: int, width: int, heads: int, key_heads: int, hidden: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)
        self.size = width // heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of the word behind each."""
        cosine, sine = angles(ids.shape[1], self.size, ids.device)
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, cosine.to(x.dtype), sine.to(x.dtype))
        found: torch.Tensor = self.head(self.norm(x))
        return found


class Layer(nn.Module):
    """Attention of grouped queries and a gated feed-forward net, each behind a norm."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.before, self.between = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, key_heads * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states, both (batch, tokens, width)."""
        batch, tokens, width = x.shape
        h = self.before(x)
        query = turned(self.query(h).view(batch, tokens, self.heads, self.size).transpose(1, 2), cosine, sine)
        key = turned(self.key(h).view(batch, tokens, self.key_heads, self.size).transpose(1, 2), cosine, sine)
        value = self.value(h).view(batch, tokens, self.key_heads, self.size).transpose(1, 2)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, width))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def angles(tokens: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary embedding, both (tokens, size)."""
    rates = 500000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    turns = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), rates)
    both = torch.cat([turns, turns], dim=1)
    return both.cos(), both.sin()


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Queries or keys (batch, heads, tokens, size) turned by their places."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
