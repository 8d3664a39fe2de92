"""Torch models of a calibration; their sizes differ from those of the models that validate a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

HEADS = 5
_HEAD_WIDTH, _VOCABULARY = 16, 5000


def feed_forward_model(layers: int, width: int, dtype: str) -> nn.Module:
    """Return linear layers of `width` x `width`, each followed by a ReLU."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*parts).to(getattr(torch, dtype))


def attention_model(blocks: int, width: int, dtype: str) -> nn.Module:
    """Return blocks of attention with `HEADS` heads and a feed-forward, each after a norm: rows x length x `width`."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, length, _ = x.shape
            heads = self.qkv(self.first(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*heads.unbind())
            x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
            hidden: torch.Tensor = self.down(F.gelu(self.up(self.second(x))))
            return x + hidden

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(blocks))).to(getattr(torch, dtype))


def language_model(heads: int) -> nn.Module:
    """Return a language model of one block of attention with so many heads, which hardly computes."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = heads * _HEAD_WIDTH
            self.table, self.norm = nn.Embedding(_VOCABULARY, width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.words = nn.Linear(width, _VOCABULARY, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            rows, length = input_ids.shape
            x = self.table(input_ids)
            normal = self.norm(x)
            q, k, v = (
                part(normal).view(rows, length, heads, _HEAD_WIDTH).transpose(1, 2) for part in (self.q, self.k, self.v)
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(rows, length, heads * _HEAD_WIDTH))
            scores: torch.Tensor = self.words(x)
            return scores

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return LanguageModel().eval()


def example(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return normally distributed numbers from a fixed seed."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(getattr(torch, dtype))
