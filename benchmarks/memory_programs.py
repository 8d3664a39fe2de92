"""Programs of many kinds, each a model with an example call under a strategy: for `benchmarks/peak_memory.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Program:
    """A model with an example call, under a strategy; trained where there is a loss."""

    name: str
    model: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    strategy: str
    loss: Callable[..., Any] | None = None

    @property
    def ranks(self) -> int:
        """How many ranks the strategy needs."""
        degrees = [int(n) for n in self.strategy.split(",")[0].split("/")]
        return degrees[0] * degrees[1] * degrees[2]


def perceptron(*widths: int) -> nn.Module:
    """Linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutions(*channels: int, kernel: int = 3, stride: int = 1, norm: bool = False) -> nn.Module:
    """Convolutions with ReLU between."""
    layers: list[nn.Module] = []
    for a, b in pairwise(channels):
        layers += [nn.Conv2d(a, b, kernel, stride, kernel // 2), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, 2, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1))
            for _ in range(3)
        )
        self.head = nn.Linear(32, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self, width: int = 96, heads: int = 6) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(x)))


class Embedding(nn.Module):
    """A vocabulary, a layer, and logits."""

    def __init__(self, words: int = 5003, width: int = 64) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(words, width), Attention(width, 4), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(ids)))


class Upsampled(nn.Module):
    """A U shape: down by strides, up by a transposed convolution, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 24, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(24, 16, 2, 2), nn.Conv2d(19, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(torch.relu(self.mid(torch.relu(self.down(x)))))
        return self.out(torch.cat([x, y], 1))


def randn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    """Normal numbers of these shapes."""
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def labelled(*shape: int, classes: int = 11, rows: int | None = None) -> Callable[[], tuple[Any, ...]]:
    """An input, and a class for each sample."""
    return lambda: (torch.randn(shape), torch.randint(0, classes, (rows or shape[0],)))


def sequence_loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits by token."""
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def words(*shape: int, vocabulary: int = 5003) -> Callable[[], tuple[Any, ...]]:
    """Token ids, and labels."""
    return lambda: (torch.randint(0, vocabulary, shape), torch.randint(0, vocabulary, shape))


def _mlp(*widths: int) -> Callable[[], nn.Module]:
    return lambda: perceptron(*widths)


def _conv(*channels: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: convolutions(*channels, **options)


TUNED = [
    Program("mlp zero=2", _mlp(512, 2048, 2048, 512), randn((8, 512), (8, 512)), "2/1/1/1,zero=2", F.mse_loss),
    Program("mlp zero=3", _mlp(512, 2048, 2048, 512), randn((8, 512), (8, 512)), "2/1/1/1,zero=3", F.mse_loss),
    Program("mlp zero=3 on 3", _mlp(509, 2039, 2039, 509), randn((9, 509), (9, 509)), "3/1/1/1,zero=3", F.mse_loss),
    Program("mlp zero=1", _mlp(512, 2048, 2048, 512), randn((8, 512), (8, 512)), "2/1/1/1,zero=1", F.mse_loss),
    Program("conv", _conv(3, 32, 64, 64), randn((4, 3, 64, 64)), "1/1/1/1"),
    Program("conv data", _conv(3, 32, 64, 64), randn((6, 3, 61, 63)), "2/1/1/1"),
    Program("conv tensor", _conv(3, 32, 64, 64), randn((4, 3, 64, 64)), "1/2/1/1"),
    Program("conv 5x5 strided", _conv(3, 48, 48, kernel=5, stride=2), randn((4, 3, 96, 96)), "1/1/1/1"),
    Program("conv trained", _conv(3, 32, 64), randn((4, 3, 32, 32), (4, 64, 32, 32)), "1/1/1/1", F.mse_loss),
    Program("conv norm trained", _conv(3, 32, 32, norm=True), randn((4, 3, 32, 32), (4, 32, 32, 32)), "2/1/1/1",
            F.mse_loss),
    Program("resnet trained", Residual, labelled(6, 3, 64, 64), "1/1/1/1", F.cross_entropy),
    Program("large output", _mlp(64, 4096), randn((512, 64)), "2/1/1/1"),
    Program("large output tensor", _mlp(64, 4099), randn((512, 64)), "1/3/1/1"),
    Program("large output microbatches", _mlp(64, 4096), randn((512, 64)), "1/1/1/4"),
    Program("logits", Embedding, lambda: (torch.randint(0, 5003, (4, 64)),), "1/2/1/1"),
]  # fmt: skip


class Recurrent(nn.Module):
    """An LSTM or a GRU, and a layer on its last state."""

    def __init__(self, kind: type[nn.Module], width: int = 96) -> None:
        super().__init__()
        self.cells, self.head = kind(40, width, 2, batch_first=True), nn.Linear(width, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, with group norm and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, 2, 1)
        self.deep, self.point = nn.Conv2d(24, 24, 5, 1, 2, groups=24), nn.Conv2d(24, 72, 1)
        self.norm, self.head = nn.GroupNorm(8, 72), nn.Linear(72, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.point(self.deep(F.relu6(self.first(x))))))
        return self.head(F.avg_pool2d(y, 3, 2, 1).mean((2, 3)))


class Distances(nn.Module):
    """All pairs of rows, their distances, and the nearest."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        apart = (x[:, None] - y[None]).square().sum(-1)
        return torch.softmax(-apart, -1) @ y


class Masked(nn.Module):
    """Attention with an explicit mask and grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 32)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 8, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, 2, 8).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        mask = torch.arange(t)[:, None] >= torch.arange(t)[None]
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, t, 64))


class Waveform(nn.Module):
    """Convolutions over one dim, strided and dilated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 32, 10, 5), nn.GELU(), nn.Conv1d(32, 64, 3, 1, 4, 4), nn.GELU(), nn.MaxPool1d(4),
            nn.Conv1d(64, 64, 3, 2, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Ranking(nn.Module):
    """Scores of many items, sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20011, 24)
        self.user = nn.Linear(30, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.user(x) @ self.items.weight.t()
        return torch.sort(scores, -1, descending=True)[0][:, :100].cumsum(-1)


class Mixture(nn.Module):
    """A soft mixture of experts, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 5)
        self.up, self.down = nn.Parameter(torch.randn(5, 48, 96) * 0.1), nn.Parameter(torch.randn(5, 96, 48) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("nd,edh->neh", x, self.up))
        return torch.einsum("ne,neh,ehd->nd", torch.softmax(self.gate(x), -1), hidden, self.down)


def _blocks(count: int) -> nn.Module:
    return nn.Sequential(*(Attention() for _ in range(count)))


def _lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def _gru() -> nn.Module:
    return Recurrent(nn.GRU)


def _volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 24, 3, 2, 1))


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(120, 480), nn.RMSNorm(480), nn.SiLU(), nn.Linear(480, 120), nn.LayerNorm(120))


_PIXELS = randn((3, 3, 64, 64), (3, 5, 64, 64))

TUNED += [
    Program("attention", lambda: _blocks(2), randn((3, 128, 96)), "1/2/1/1"),
    Program("attention trained", lambda: _blocks(2), randn((3, 64, 96), (3, 64, 96)), "1/3/1/1", F.mse_loss),
    Program("attention stages", lambda: _blocks(4), randn((6, 64, 96), (6, 64, 96)), "1/1/2/3", F.mse_loss),
    Program("masked attention", Masked, randn((4, 96, 64)), "1/1/1/1"),
    Program("masked trained", Masked, randn((4, 96, 64), (4, 96, 64)), "2/1/1/1", F.mse_loss),
    Program("language model trained", Embedding, words(4, 32), "1/2/1/1", sequence_loss),
    Program("language model zero=1", Embedding, words(4, 32), "2/1/1/1,zero=1", sequence_loss),
    Program("u shape", Upsampled, randn((3, 3, 64, 64)), "1/1/1/1"),
    Program("u shape trained", Upsampled, _PIXELS, "3/1/1/1", F.mse_loss),
    Program("lstm", _lstm, randn((32, 50, 40)), "1/1/1/1"),
    Program("gru trained", _gru, labelled(32, 20, 40), "2/1/1/1", F.cross_entropy),
    Program("separable", Separable, randn((5, 3, 97, 97)), "1/1/1/1"),
    Program("separable trained", Separable, labelled(6, 3, 65, 65), "2/1/1/1", F.cross_entropy),
    Program("distances", Distances, randn((301, 24), (401, 24)), "3/1/1/1"),
    Program("waveform", Waveform, randn((4, 1, 8000)), "1/1/1/1"),
    Program("waveform trained", Waveform, randn((4, 1, 4000), (4, 64, 100)), "1/1/1/1", F.mse_loss),
    Program("volume", _volume, randn((2, 2, 24, 24, 24)), "1/1/1/1"),
    Program("ranking", Ranking, randn((37, 30)), "1/1/1/1"),
    Program("mixture trained", Mixture, randn((512, 48), (512, 48)), "1/1/1/4", F.mse_loss),
    Program("norms trained", _norms, randn((999, 120), (999, 120)), "3/1/1/1,checkpoint=selective", F.mse_loss),
    Program("convolutions in space", _conv(3, 32, 32), randn((1, 3, 120, 120)), "1/3/1/1"),
    Program("bottleneck trained", _conv(16, 64, 16, kernel=1), randn((4, 16, 40, 40), (4, 16, 40, 40)), "2/1/1/1",
            F.mse_loss),
]  # fmt: skip


class Mixer(nn.Module):
    """Layers over tokens and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(49, 49), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return y + F.gelu(self.channels(y))


class Patches(nn.Module):
    """An image in patches, attention over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Conv2d(3, 64, 8, 8), Attention(64, 4), nn.Linear(64, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.layer(y).mean(1))


class Squeeze(nn.Module):
    """Channels weighed by their means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(8, 40, 3, 1, 1), nn.Linear(40, 10), nn.Linear(10, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.leaky_relu(self.conv(x))
        share = torch.sigmoid(self.up(torch.relu(self.down(F.adaptive_avg_pool2d(y, 1).flatten(1)))))
        return y * share[:, :, None, None]


class Graph(nn.Module):
    """Messages along edges, gathered and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sent = torch.relu(self.message(x[source]))
        return self.update(torch.zeros(x.shape[0], 48).index_add(0, target, sent))


class Generator(nn.Module):
    """Transposed convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(20, 48, 4, 1), nn.BatchNorm2d(48), nn.ReLU(), nn.ConvTranspose2d(48, 24, 4, 2, 1),
            nn.BatchNorm2d(24), nn.ReLU(), nn.ConvTranspose2d(24, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Tabular(nn.Module):
    """Small tables, joined, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in (101, 1009, 37))
        self.norm, self.layers = nn.BatchNorm1d(24), perceptron(24, 200, 100, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(torch.cat([t(x[:, i]) for i, t in enumerate(self.tables)], -1)))


def _edges() -> tuple[Any, ...]:
    return torch.randn(300, 32), torch.randint(0, 300, (2000,)), torch.randint(0, 300, (2000,))


def _table() -> tuple[Any, ...]:
    return torch.randint(0, 37, (600, 3)), torch.randn(600, 1)


class Tied(nn.Module):
    """Words, positions and kinds, two layers, and logits by the words' own table."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(997, 48), nn.Embedding(64, 48), nn.Embedding(2, 48)
        self.norm, self.layers = nn.LayerNorm(48), nn.ModuleList(Attention(48, 4) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1])
        x = self.norm(self.word(ids) + self.place(place) + self.kind(ids % 2))
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.word.weight)


class Depthwise(nn.Module):
    """ConvNeXt's block: a depthwise convolution, and layers over channels that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(32, 32, 7, 1, 3, groups=32), nn.LayerNorm(32)
        self.up, self.down, self.scale = nn.Linear(32, 128), nn.Linear(128, 32), nn.Parameter(torch.ones(32) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Neighbours(nn.Module):
    """A graph with a dense adjacency, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(60, 90), nn.Linear(90, 13)

    def forward(self, x: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        near = torch.softmax(links, -1)
        return near @ self.second(F.elu(near @ self.first(x)))


class Crossed(nn.Module):
    """Tables and numbers, all products of pairs, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 12) for n in (1500, 333, 77))
        self.low, self.high = perceptron(10, 60, 12), perceptron(28, 120, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        rows = torch.stack([low, *(t(ids[:, i]) for i, t in enumerate(self.tables))], 1)
        return self.high(torch.cat([low, (rows @ rows.transpose(1, 2)).flatten(1)], -1))


class Translation(nn.Module):
    """A GRU reads, another writes from its state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.read, self.write = nn.Embedding(401, 32), nn.GRU(32, 48), nn.GRU(32, 48)
        self.head = nn.Linear(48, 401)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        state = self.read(self.table(source))[1]
        return self.head(self.write(self.table(target), state)[0])


def _sentences() -> tuple[Any, ...]:
    return (torch.randint(0, 401, (17, 12)), torch.randint(0, 401, (11, 12))), torch.randint(0, 401, (11, 12))


def _clicks() -> tuple[Any, ...]:
    return (torch.randn(300, 10), torch.randint(0, 77, (300, 3))), torch.rand(300, 1)


def _noised() -> tuple[Any, ...]:
    return (torch.randn(6, 3, 24, 24), torch.randn(6, 16)), torch.randn(6, 3, 24, 24)


def _translated() -> tuple[Any, ...]:
    return (torch.randn(4, 40, 64), torch.randn(4, 70, 64)), torch.randn(4, 40, 64)


def _pairs() -> tuple[Any, ...]:
    return (torch.randn(24, 3, 32, 32), torch.randint(0, 701, (24, 9))), torch.arange(24)


def _plain() -> nn.Module:
    return Recurrent(nn.RNN)


class Denoiser(nn.Module):
    """A diffusion model's network: an image and a time, down, attention in the middle, up by nearest neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(16, 32), nn.Conv2d(3, 32, 3, 1, 1)
        self.down, self.layer = nn.Conv2d(32, 48, 3, 2, 1), Attention(48, 3)
        self.up, self.norm, self.last = nn.Conv2d(48, 32, 3, 1, 1), nn.GroupNorm(4, 32), nn.Conv2d(64, 3, 3, 1, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.first(x) + self.time(t)[:, :, None, None])
        z = self.down(y)
        z = self.layer(z.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(z.shape)
        z = F.silu(self.norm(self.up(F.interpolate(z, scale_factor=2))))
        return self.last(torch.cat([y, z], 1))


class Decoder(nn.Module):
    """Self-attention, and attention to an encoded sequence."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.own = Attention(width, 4)
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(-1, (2, 4, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Autoencoder(nn.Module):
    """Means and variances of a code, and the image again."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = perceptron(784, 300, 40), perceptron(20, 300, 784)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        return torch.sigmoid(self.decode(mean + spread.exp() * 0.5)) + 0.01 * (mean.square() + spread).sum(-1)[:, None]


class Towers(nn.Module):
    """Two encoders, and the similarity of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = convolutions(3, 16, 32, stride=2), nn.Embedding(701, 48)
        self.left, self.right = nn.Linear(32, 24), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        a = F.normalize(self.left(self.image(x).mean((2, 3))), dim=-1)
        b = F.normalize(self.right(self.text(ids).mean(1)), dim=-1)
        return a @ b.t() * 10


class Gated(nn.Module):
    """Dilated convolutions over a waveform with gates, and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 24, 1)
        self.layers = nn.ModuleList(nn.Conv1d(24, 48, 3, 1, 2**i, 2**i) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        total = torch.zeros_like(y)
        for layer in self.layers:
            left, right = layer(y).chunk(2, 1)
            gated = torch.tanh(left) * torch.sigmoid(right)
            y, total = y + gated, total + gated
        return total


class Windows(nn.Module):
    """Attention within windows of an image that is shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        y = torch.roll(x, (2, 2), (1, 2)).view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3)
        y = self.layer(y.reshape(-1, 16, c)).view(b, h // 4, w // 4, 4, 4, c).transpose(2, 3)
        return torch.roll(y.reshape(b, h, w, c), (-2, -2), (1, 2))


class Scan(nn.Module):
    """A gated sum over time, by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(40, 160), nn.Linear(80, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.inner(x).chunk(2, -1)
        decay = F.logsigmoid(gate).cumsum(1)
        return self.outer(torch.tanh((value * torch.exp(-0.01 * decay)).cumsum(1)))


class Pieces(nn.Module):
    """Convolutions over words of a text, their maxima over time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2003, 40)
        self.layers = nn.ModuleList(nn.Conv1d(40, 30, k) for k in (2, 3, 5))
        self.head = nn.Linear(90, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids).transpose(1, 2)
        return self.head(torch.cat([F.relu(layer(x)).amax(-1) for layer in self.layers], -1))


class Bilinear(nn.Module):
    """A factorization machine: a bag of embeddings and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(6007, 16), nn.Embedding(6007, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.weight(ids).sum((1, 2)) + 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(-1)


class Resampled(nn.Module):
    """An image shrunk, convolved, and enlarged between its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions(3, 24, 24, norm=True)
        self.last = nn.Conv2d(24, 3, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.body(F.avg_pool2d(x, 2))
        return self.last(F.interpolate(small, scale_factor=2.0, mode="bilinear", align_corners=False))


UNSEEN = [
    Program("mixer", Mixer, randn((16,49,64)), "1/1/1/1"),
    Program("mixer trained", Mixer, randn((16,49,64),(16,49,64)), "2/1/1/1,zero=2", F.mse_loss),
    Program("patches trained", Patches, labelled(6,3,64,64), "1/2/1/1", F.cross_entropy),
    Program("patches stages", Patches, labelled(6,3,64,64), "1/1/2/2", F.cross_entropy),
    Program("squeeze", Squeeze, randn((5,8,50,50)), "3/1/1/1"),
    Program("squeeze trained", Squeeze, randn((6,8,50,50),(6,40,50,50)), "2/1/1/1", F.mse_loss),
    Program("graph", Graph, _edges, "1/1/1/1"),
    Program("generator", Generator, randn((8,20,5,5)), "1/1/1/1"),
    Program("generator trained", Generator, randn((8,20,5,5),(8,3,32,32)), "2/1/1/1", F.mse_loss),
    Program("tabular trained", Tabular, _table, "3/1/1/1,zero=3", F.mse_loss),
    Program("plain rnn trained", _plain, labelled(30,25,40), "3/1/1/1", F.cross_entropy),
    Program("attention zero=3", lambda: _blocks(3), randn((6, 50, 96), (6, 50, 96)), "2/1/1/3,zero=3,checkpoint=block",
            F.mse_loss),
    Program("denoiser", Denoiser, randn((4, 3, 24, 24), (4, 16)), "2/1/1/1"),
    Program("denoiser trained", Denoiser, _noised, "3/1/1/1", F.mse_loss),
    Program("decoder", Decoder, randn((5, 40, 64), (5, 70, 64)), "1/2/1/1"),
    Program("decoder trained", Decoder, _translated, "2/1/1/2,zero=2", F.mse_loss),
    Program("autoencoder trained", Autoencoder, randn((60, 784), (60, 784)), "1/1/2/3", F.mse_loss),
    Program("autoencoder zero=1", Autoencoder, randn((60, 784), (60, 784)), "3/1/1/1,zero=1", F.mse_loss),
    Program("towers trained", Towers, _pairs, "1/1/1/1", F.cross_entropy),
    Program("gated", Gated, randn((3, 1, 3001)), "1/3/1/1"),
    Program("gated trained", Gated, randn((4, 1, 1501), (4, 24, 1501)), "2/1/1/2", F.mse_loss),
    Program("windows", Windows, randn((4, 24, 24, 48)), "1/1/1/2"),
    Program("windows trained", Windows, randn((6, 16, 16, 48), (6, 16, 16, 48)), "1/3/1/1", F.mse_loss),
    Program("scan trained", Scan, randn((8, 100, 40), (8, 100, 40)), "2/1/1/1,zero=3", F.mse_loss),
    Program("pieces trained", Pieces, lambda: (torch.randint(0, 2003, (30, 50)), torch.randint(0, 7, (30,))),
            "3/1/1/1,zero=2", F.cross_entropy),
    Program("bilinear trained", Bilinear, lambda: (torch.randint(0, 6007, (200, 12)), torch.randn(200)), "2/1/1/1",
            F.mse_loss),
    Program("resampled", Resampled, randn((3, 3, 80, 80)), "3/1/1/1"),
    Program("resampled trained", Resampled, randn((4, 3, 48, 48), (4, 3, 48, 48)), "2/1/1/1", F.mse_loss),
    Program("deep mlp stages", _mlp(128, *[256] * 9, 64), randn((90, 128), (90, 64)), "1/1/3/5", F.mse_loss),
    Program("blocks interleaved", lambda: _blocks(4), randn((6, 48, 96), (6, 48, 96)),
            "1/1/2/6,schedule=interleaved,chunks=2", F.mse_loss),
    Program("blocks checkpointed", lambda: _blocks(5), randn((4, 80, 96), (4, 80, 96)), "1/2/1/2,checkpoint=block",
            F.mse_loss),
    Program("volume trained", _volume, randn((4, 2, 16, 16, 16), (4, 24, 4, 4, 4)), "2/1/1/1", F.mse_loss),
    Program("lstm stages", _lstm, labelled(30, 25, 40), "1/1/2/3", F.cross_entropy),
    Program("generator tensor", Generator, randn((8, 20, 5, 5)), "1/3/1/1"),
    Program("tied trained", Tied, words(6, 40, vocabulary=997), "1/2/1/1", sequence_loss),
    Program("tied stages", Tied, words(6, 40, vocabulary=997), "1/1/2/3", sequence_loss),
    Program("depthwise", Depthwise, randn((3, 32, 40, 40)), "1/2/1/1"),
    Program("depthwise trained", Depthwise, randn((4, 32, 28, 28), (4, 32, 28, 28)), "2/1/1/1", F.mse_loss),
    Program("neighbours", Neighbours, randn((251, 60), (251, 251)), "1/3/1/1"),
    Program("crossed trained", Crossed, _clicks, "3/1/1/1,zero=1", F.binary_cross_entropy_with_logits),
    Program("translation", Translation, lambda: _sentences()[0], "2/1/1/1"),
    Program("resnet stages", Residual, labelled(6, 3, 64, 64), "1/1/2/3", F.cross_entropy),
]  # fmt: skip
