"""Small functions, each with the ways in which it is distributed: dims of up to 7, on 2 and 3 ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr


@dataclass(frozen=True)
class Function:
    """A model with its inputs, a loss if it is trained, the options of the compiler, and given inputs of integers."""

    model: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    loss: Callable[..., torch.Tensor] | None = None
    trained: bool = False
    integers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def compile(self) -> dr.Plan:
        torch.manual_seed(0)
        model = self.model().double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dr.ImplicitGatherWarning)
            if not self.trained:
                return dr.compile(model.eval(), self.inputs, check=True, **self.options)
            batch = self.inputs if self.loss is not None else self.inputs[0]
            options = {"optimizer": dr.optim.SGD(0.1), **self.options}
            return dr.compile_training(model, self.loss, example_batch=batch, check=True, **options).plan


class Lambda(nn.Module):
    """A function of its inputs and of weights of the given shapes."""

    def __init__(self, function: Callable[..., Any], **weights: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in weights.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.parameters())


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def of(function: Callable[..., Any], *inputs: Any, weights: Mapping[str, tuple[int, ...]] | None = None,
       **options: Any) -> Function:  # fmt: skip
    return Function(lambda: Lambda(function, **(weights or {})), inputs, options)


def net(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def linear(rows: int, columns: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(rows, columns, bias=bias)


MLP = net(linear(3, 5), nn.Tanh, linear(5, 2))
IDS = torch.tensor([[0, 4, 2], [1, 1, 3]])


class Attention(nn.Module):
    """Attention of heads of two numbers each, with grouped keys and values if there are fewer of those."""

    def __init__(self, heads: int, groups: int, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 2 * n, bias=False) for n in (heads, groups, groups))
        self.out, self.causal, self.grouped = nn.Linear(2 * heads, 2, bias=False), causal, heads != groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, 2)).transpose(1, 2) for y in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class ByHand(nn.Module):
    """Attention of one head in ops of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.q(x) @ self.k(x).mT * 0.5, -1) @ self.v(x)


class Gated(nn.Module):
    """A gated feed-forward net after a norm, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(2, eps=1e-6)
        self.gate, self.up, self.down = nn.Linear(2, 3, False), nn.Linear(2, 3, False), nn.Linear(3, 2, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Tied(nn.Module):
    """Words that are looked up and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.words(ids)), self.words.weight)


class Step(nn.Module):
    """Attention of one new token to a cache of keys and values, which it returns with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        q, k, v = (y(x).unflatten(-1, (2, 2)).transpose(1, 2) for y in (self.q, self.k, self.v))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values


class Experts(nn.Module):
    """Three experts, of which each row takes the one of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.einsum("rk,rkn->rn", x, self.weights[ids])


def trained(model: Callable[[], nn.Module], *inputs: Any, loss: Any = F.mse_loss, **options: Any) -> Function:
    return Function(model, inputs, options, loss, trained=True)


def mean_square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def next_words(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, -2), target.flatten())


PAIR = (floats(4, 3), floats(4, 2))
FUNCTIONS: dict[str, Function] = {
    # Products.
    "linear, columns": Function(
        linear(3, 5), (floats(4, 3),), {"mesh": 3, "shardings": {"weight": "S[0]", "bias": "S[0]"}}
    ),
    "linear, rows": Function(linear(5, 3), (floats(2, 5),), {"mesh": 3, "shardings": {"weight": "S[1]"}}),
    "linear, batch": Function(linear(3, 2), (floats(5, 3),), {"mesh": 3, "shardings": {"input": "S[0]"}}),
    "linear, padded": Function(
        linear(5, 3), (floats(2, 5),), {"mesh": 3, "shardings": {"weight": "S[1]"}, "tail": "pad"}
    ),
    "product of inputs": of(lambda x, y: x @ y, floats(2, 3, 5), floats(5, 2), mesh=2, shardings={"inputs_0": "S[2]"}),
    "batched product": of(torch.matmul, floats(3, 2, 4), floats(3, 4, 2), mesh=3, shardings={"inputs_0": "S[2]"}),
    "einsum": of(
        lambda x, w: torch.einsum("abc,dc->bad", x, w),
        floats(2, 3, 4),
        weights={"w": (5, 4)},
        mesh=3,
        shardings={"w": "S[1]"},
    ),
    "two products": Function(
        net(linear(3, 4), linear(4, 2)), (floats(2, 3),), {"mesh": 2, "shardings": {"0.weight": "S[0]"}}
    ),
    # Nets.
    "mlp": Function(MLP, (floats(2, 3),), {"mesh": 2, "shardings": {"0.weight": "S[0]"}}),
    "mlp, 3 ranks, padded": Function(
        MLP, (floats(2, 3),), {"mesh": 3, "shardings": {"0.weight": "S[0]"}, "tail": "pad"}
    ),
    "mlp, strategy": Function(net(linear(3, 4), nn.GELU, linear(4, 3)), (floats(2, 3),), {"strategy": "1/2/1/1"}),
    "mlp, relu": Function(net(linear(2, 5), nn.ReLU, linear(5, 2)), (floats(2, 2),), {"strategy": "1/3/1/1"}),
    "mlp, data": Function(MLP, (floats(4, 3),), {"strategy": "3/1/1/1"}),
    "gated": Function(Gated, (floats(2, 2),), {"strategy": "1/3/1/1"}),
    "pipeline": Function(MLP, (floats(4, 3),), {"strategy": "1/1/2/2"}),
    "pipeline, 3 stages": Function(
        net(linear(2, 3), nn.Tanh, linear(3, 3), nn.Tanh, linear(3, 2)), (floats(3, 2),), {"strategy": "1/1/3/3"}
    ),
    "scaled sum": of(
        lambda x, w, c: (x @ w) * c, floats(2, 5), weights={"w": (5, 3), "c": (2, 1)}, mesh=3, shardings={"w": "S[0]"}
    ),
    # Attention.
    "attention, heads": Function(lambda: Attention(2, 2), (floats(1, 2, 2),), {"strategy": "1/2/1/1"}),
    "attention, causal": Function(lambda: Attention(3, 3, True), (floats(1, 3, 2),), {"strategy": "1/3/1/1"}),
    "attention, groups": Function(lambda: Attention(4, 2), (floats(1, 2, 2),), {"strategy": "1/2/1/1"}),
    "attention by hand": Function(ByHand, (floats(2, 3, 2),), {"strategy": "2/1/1/1"}),
    "attention, queries": Function(ByHand, (floats(1, 3, 2),), {"mesh": 3, "shardings": {"x": "S[1]"}}),
    "cache step": Function(Step, (floats(1, 1, 2), floats(1, 2, 2, 2), floats(1, 2, 2, 2)), {"strategy": "1/2/1/1"}),
    # Norms and softmax.
    "layer norm": Function(lambda: nn.LayerNorm(2), (floats(5, 2),), {"mesh": 3, "shardings": {"input": "S[0]"}}),
    "layer norm, its dim": Function(
        lambda: nn.LayerNorm(4), (floats(2, 4),), {"mesh": 2, "shardings": {"input": "S[1]"}}
    ),
    "batch norm": Function(lambda: nn.BatchNorm1d(5), (floats(3, 5),), {"mesh": 3, "shardings": {"input": "S[1]"}}),
    "group norm": Function(lambda: nn.GroupNorm(2, 4), (floats(2, 4, 2),), {"mesh": 2, "shardings": {"input": "S[1]"}}),
    "softmax, its dim": of(lambda x: torch.softmax(x, 1), floats(2, 3), mesh=3, shardings={"inputs_0": "S[1]"}),
    "log softmax": of(lambda x: F.log_softmax(x, 1), floats(4, 3), mesh=2, shardings={"inputs_0": "S[0]"}),
    # Reductions.
    "mean": of(lambda x: x.mean(1), floats(2, 5), mesh=3, shardings={"inputs_0": "S[1]"}),
    "mean, padded": of(lambda x: x.mean(1), floats(2, 5), mesh=3, shardings={"inputs_0": "S[1]"}, tail="pad"),
    "variance": of(lambda x: x.var(1), floats(2, 5), mesh=3, shardings={"inputs_0": "S[1]"}),
    "maximum": of(lambda x: x.amax(1), floats(2, 5), mesh=3, shardings={"inputs_0": "S[1]"}),
    "running sum": of(lambda x: x.cumsum(1), floats(3, 4), mesh=2, shardings={"inputs_0": "S[0]"}),
    # Windows.
    "convolution": Function(
        lambda: nn.Conv1d(2, 2, 3, padding=1), (floats(1, 2, 5),), {"mesh": 2, "shardings": {"input": "S[2]"}}
    ),
    "convolution, 3 ranks": Function(
        lambda: nn.Conv1d(1, 2, 3, padding=2, dilation=2),
        (floats(1, 1, 7),),
        {"mesh": 3, "shardings": {"input": "S[2: 3|2|2]"}},
    ),
    "convolution, channels": Function(
        lambda: nn.Conv2d(3, 2, 2), (floats(1, 3, 3, 3),), {"mesh": 3, "shardings": {"weight": "S[1]"}}
    ),
    "two convolutions": Function(
        net(lambda: nn.Conv1d(1, 2, 3, padding=1), nn.Tanh, lambda: nn.Conv1d(2, 1, 3, padding=1)),
        (floats(1, 1, 5),),
        {"mesh": 2, "shardings": {"input": "S[2: 2|3]"}},
    ),
    "pooling": Function(
        lambda: nn.AvgPool1d(3, 2, padding=1), (floats(1, 2, 7),), {"mesh": 3, "shardings": {"input": "S[2]"}}
    ),
    # Lookups.
    "embedding": Function(lambda: nn.Embedding(5, 2), (IDS,), {"mesh": 3, "shardings": {"weight": "S[0]"}}),
    "tied words": Function(Tied, (IDS,), {"strategy": "1/3/1/1"}),
    "experts": Function(
        Experts, (floats(4, 2), torch.tensor([0, 2, 1, 2])), {"mesh": 3, "shardings": {"weights": "S[0]"}}
    ),
    "losses": Function(
        lambda: Lambda(next_words), (floats(2, 5), torch.tensor([4, 1])), {"mesh": 2, "shardings": {"inputs_0": "S[1]"}}
    ),
    # Training.
    "training, data": trained(linear(3, 2), *PAIR, strategy="2/1/1/1"),
    "training, uneven data": trained(linear(3, 2), *PAIR, strategy="3/1/1/1"),
    "training, microbatches": trained(MLP, *PAIR, strategy="1/1/1/2"),
    "training, tensor": trained(MLP, *PAIR, strategy="1/2/1/1"),
    "training, 3 ranks": trained(MLP, floats(2, 3), floats(2, 2), strategy="1/3/1/1"),
    "training, ZeRO": trained(MLP, *PAIR, strategy="3/1/1/1,zero=3"),
    "training, ZeRO 1": trained(linear(3, 2), *PAIR, strategy="3/1/1/1,zero=1"),
    "training, pipeline": trained(MLP, *PAIR, strategy="1/1/2/2"),
    "training, recomputation": trained(
        net(linear(2, 3), nn.Tanh, linear(3, 2)), floats(2, 2), floats(2, 2), strategy="2/1/1/1,checkpoint=block"
    ),
    "training, classes": trained(
        linear(2, 3), floats(3, 2), torch.tensor([2, 0, 1]), loss=F.cross_entropy, strategy="3/1/1/1"
    ),
    "training, tied words": trained(
        Tied, torch.tensor([[0, 4], [1, 1]]), torch.tensor([[4, 2], [1, 3]]), loss=next_words, strategy="2/1/1/1"
    ),
    "training, norm": trained(
        net(linear(2, 2), lambda: nn.LayerNorm(2)), floats(2, 2), floats(2, 2), loss=mean_square, strategy="2/1/1/1"
    ),
    "training, attention": trained(
        lambda: Attention(1, 1), floats(2, 2, 2), floats(2, 2, 2), loss=mean_square, strategy="2/1/1/1"
    ),
    "training, convolution": trained(lambda: nn.Conv1d(1, 2, 2), floats(2, 1, 4), floats(2, 2, 3), strategy="2/1/1/1"),
}


@cache
def plan(name: str) -> dr.Plan:
    """Return the plan of a function, which is proved."""
    return FUNCTIONS[name].compile()
