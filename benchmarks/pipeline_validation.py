"""Pipelines on two ranks to predict and to run: three models, schedules, 1 to 16 microbatches, checkpointing.

    distir validate benchmarks/pipeline_validation.py:configurations --calibrate cpu.toml --passes 5 --plot scatter.svg

None of these models is among those that a profile is calibrated on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from validation_models import Encoder

import distir_relax as dr

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved,chunks=2", "zb-v,chunks=2")

Made = tuple[nn.Module, Callable[[Any, Any], Any], Any, Any]


def configurations() -> dict[str, Any]:
    """All of them by name."""
    return {**_steps(gpt2, (4, 7)), **_steps(mlp, (3, 8)), **_steps(encoder, (2, 5))}


def strategies(compared: Sequence[int]) -> list[str]:
    """All schedules with each number of microbatches in `compared`, 1F1B with others too, and checkpointing."""
    found = [f"1/1/2/{count},schedule={schedule}" for count in compared for schedule in SCHEDULES]
    found += [f"1/1/2/{count},schedule=1f1b" for count in (1, 11, 16)]
    return [*found, *(f"1/1/2/{compared[0]},schedule={name},checkpoint=block" for name in ("1f1b", "gpipe"))]


def _steps(make: Callable[[], Made], compared: Sequence[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, optimizer, batch = make()
    return {
        f"{make.__name__} {strategy}": dr.compile_training(
            model, loss, optimizer=optimizer, example_batch=batch, strategy=strategy, name=make.__name__
        )
        for strategy in strategies(compared)
    }


class Block(nn.Module):
    """A block of GPT-2: attention and a feed-forward, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Layer(nn.Module):
    """A layer of an encoder: attention to all positions and a gated feed-forward, a norm behind each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = (p(x).view(rows, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(rows, length, width)
        x = self.first(x + self.out(attended))
        return self.second(x + self.down(F.silu(self.gate(x)) * self.up(x)))


def gpt2() -> Made:
    """6 blocks of 192 on 17 samples of 48 tokens."""
    width, words, shape = 192, 1500, (17, 48)
    blocks = [Block(width, 6) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words, bias=False))
    batch = torch.randint(words, shape), torch.randint(words, shape)
    return model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), dr.optim.AdamW(lr=1e-4), batch


def mlp() -> Made:
    """7 blocks of 480 by 1100 on 203 samples."""
    blocks = (nn.Sequential(nn.Linear(480, 1100), nn.GELU(), nn.Linear(1100, 480)) for _ in range(7))
    return nn.Sequential(*blocks), F.mse_loss, dr.optim.SGD(lr=1e-3), (torch.randn(203, 480), torch.randn(203, 480))


def encoder() -> Made:
    """5 layers of 160 on 22 samples of 65 patches."""
    batch = torch.randn(22, 65, 48), torch.randint(10, (22,))
    return Encoder((Layer(160, 5) for _ in range(5)), 160, 48, 10), F.cross_entropy, dr.optim.AdamW(lr=1e-4), batch
