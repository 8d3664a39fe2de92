"""Small models of several kinds, and their results in another precision, by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distir_relax.kernels.quantized import dequantize, quantize_int4, quantize_int8, quantize_int8_groups

QUANTIZE: Mapping[str, Any] = MappingProxyType(
    {"int8": quantize_int8_groups, "int8-channel": quantize_int8, "int4": quantize_int4}
)


class Mlp(nn.Module):
    """Odd sizes, a norm, and a result in float32 that the model itself asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(127, 96), nn.LayerNorm(96), nn.Linear(96, 127)

    def forward(self, x: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(F.gelu(self.up(x)))
        return self.down(y) * flags, y.float().square().mean(1)


class Attention(nn.Module):
    """Three heads of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) / 32**0.5
        if mask is not None:
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward layer, with residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(96), Attention(), nn.LayerNorm(96)
        self.up, self.down = nn.Linear(96, 160), nn.Linear(160, 96)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """Patches of images, in the manner of ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, 96, 4, 4), nn.Parameter(torch.randn(1, 1, 96))
        self.positions = nn.Parameter(torch.randn(1, 10, 96) / 3)
        self.block, self.head = Block(), nn.Linear(96, 31)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return {"logits": self.head(self.block(x)[:, 0])}


class Words(nn.Module):
    """A causal language model in the manner of GPT-2, with a classifier that shares its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(127, 96), nn.Embedding(16, 96)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(96)
        self.head = nn.Linear(96, 127, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        x = self.words(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x, places[:, None] < places)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


INPUTS: Mapping[str, Callable[[], tuple[torch.Tensor, ...]]] = MappingProxyType(
    {
        "mlp": lambda: (torch.randn(5, 127), torch.randint(1, 3, (5, 1))),
        "vision": lambda: (torch.randn(2, 3, 12, 12),),
        "words": lambda: (torch.randint(0, 127, (2, 9)),),
    }
)


@cache
def model(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and its inputs; outputs of its layers differ in size."""
    torch.manual_seed(5)
    made = {"mlp": Mlp, "vision": Vision, "words": Words}[name]().eval()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(torch.linspace(0.5, 3.0, len(module.weight))[:, None])
    return made, INPUTS[name]()


def results(result: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(result, dict):
        return list(result.values())
    return [result] if isinstance(result, torch.Tensor) else list(result)


@cache
def expected(name: str, precision: str) -> list[torch.Tensor]:
    """What a model computes, by torch: in bfloat16, or with dequantized weights."""
    made, inputs = deepcopy(model(name)[0]), model(name)[1]
    if precision == "bf16":
        made, inputs = made.bfloat16(), tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    elif precision in QUANTIZE:
        tables = {id(m.weight) for m in made.modules() if isinstance(m, nn.Embedding)}
        for module in made.modules():
            if isinstance(module, nn.Linear) and module.in_features % 32 == 0:
                is_table = id(module.weight) in tables
                quantize = quantize_int8_groups if precision == "int4" and is_table else QUANTIZE[precision]
                module.weight.data.copy_(dequantize(*quantize(module.weight.data)))
    with torch.no_grad():
        return [x.float() for x in results(made(*inputs))]
