"""Dropout of programs that are trained: by seed and position, alike on any number of ranks, forwards and backwards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import Training

import distir_relax as dr
from distir_relax.errors import ImportModelError, UnsupportedOpError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret import interpret


class Layer(nn.Module):
    """An attention with dropout of its shares, and a product with dropout in place."""

    def __init__(self, width: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.inside = nn.Dropout(0.3), nn.Dropout(0.4, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        return x + self.drop(self.out(self.inside(torch.tanh(y.transpose(1, 2).reshape(b, s, w)))))


class Layers(nn.Module):
    """Equal layers, behind dropout of positions that are known and before dropout of whole channels."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.register_buffer("places", torch.randn(7, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.places, 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        return (F.dropout1d(x, 0.3, self.training) ** 2).mean()


def x_of(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def trained(seed: int = 3, rows: int = 5, count: int = 3) -> Training:
    torch.manual_seed(0)
    return Training(Layers(count).double(), (x_of(rows),), seed=seed)


def test_layers_stay_one_function_and_each_drops_others() -> None:
    module = trained().module
    forward = [f for f in module.functions if f.name == "layer_forward"]
    assert len(forward) == 1
    seeds = [op.results[0].name for op in forward[0].ops if op.name == "next_seed"]
    assert len(seeds) == 3
    calls = [op for op in module.main.ops if op.callee == "layer_forward"]
    given = [next(v.name for v in call.operands if v.tensor.dtype == "int64" and not v.tensor.shape) for call in calls]
    assert len(set(given)) == 3, "each call takes the seed that the one before has given"


def test_gradients_are_those_of_what_was_dropped() -> None:
    """By torch's autograd through the forward program, whose masks are the kernel's."""
    one = trained()
    found = one.whole()
    forward = import_torch(Layers(3).double(), (x_of(),), training=True).module
    tensors = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in one.imported.tensors.items()
    }
    loss = interpret(forward, {**tensors, **one.inputs})["output"]
    loss.backward()
    torch.testing.assert_close(found["output"], loss.detach())
    for name in (i.value.name for i in one.module.main.inputs if i.role == "parameter"):
        torch.testing.assert_close(found[f"{name}.grad"], tensors[name].grad, rtol=1e-10, atol=1e-12)


ROWS, HEADS = {"x": "S[0]"}, {"*.qkv.weight": "S[0]"}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("mesh", "shardings", "tail"),
    [
        (3, ROWS, "ragged"), (5, ROWS, "pad"), (7, ROWS, "ragged"), (3, HEADS, "ragged"), (2, HEADS, "pad"),
        (3, {"x": "S[1]"}, "ragged"), ((2, 3), {"x": "S[0], R", "*.qkv.weight": "R, S[0]"}, "pad"),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_drop_what_one_process_drops(mesh: Any, shardings: dict[str, str], tail: str) -> None:
    one = trained(count=2)
    found = one.on_ranks(mesh, shardings, tail=tail)
    for name, expected in one.whole().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-11)


def test_both_backends_drop_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), Sum())
    one = Training(model.double(), (x_of(),), seed=11)
    found = one.on_ranks(3, {"input": "S[0]"}, "tvm")
    for name, expected in one.whole().items():
        torch.testing.assert_close(found[name], expected)


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()


def test_another_seed_drops_others() -> None:
    losses = {float(trained(seed, count=1).whole()["output"]) for seed in range(5)}
    assert len(losses) == 5


def test_the_seed_is_an_input_where_something_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Dropout(0.0))
    dropping = import_torch(model, (x_of().float(),), training=True)
    assert [i.value.name for i in dropping.module.main.inputs if i.role == "input"] == ["input", "seed"]
    assert "seed" not in dropping.flatten((x_of().float(),), {})
    for other in (model[:1], model[2:], model.eval()):
        kept = import_torch(other, (x_of().float(),), training=True)
        assert all(i.value.name != "seed" for i in kept.module.main.inputs)
    assert not any(op.name == "nn.dropout" for op in kept.module.main.ops)


def test_dropout_between_recurrent_layers_is_imported() -> None:
    torch.manual_seed(0)
    model, x = nn.GRU(6, 5, num_layers=3, dropout=0.5).double(), x_of()
    imported = import_torch(model, (x,), check=True, training=True)
    rates = [op.attrs["rate"] for op in imported.module.main.ops if op.name == "nn.dropout"]
    assert rates == [0.5, 0.5], "not behind the last layer"


class Seeded(nn.Module):
    def forward(self, seed: torch.Tensor) -> torch.Tensor:
        return F.dropout(seed, 0.5)


class Paths(nn.Module):
    """Stochastic depth as timm has it, and dropout of channels where memory is written through a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)
        x[:, 0] = x[:, 1]
        return F.dropout1d(x, 0.5, self.training)


def test_stochastic_depth_drops_whole_rows() -> None:
    x = x_of(127) + 10
    imported = import_torch(Paths(), (x,), check=True, training=True)
    (found,) = interpret(imported.module, {**imported.flatten((x,), {}), "seed": torch.tensor(1)}).values()
    x[:, 0] = x[:, 1]
    factors = (found / x).round(decimals=6)
    assert set(factors.unique().tolist()) == {0.0, 2.0, round(2 + 2 / 0.7, 6)}
    assert bool((factors == factors[:, :, :1]).all()), "whole channels"
    kept = factors.amax((1, 2)) > 2
    assert abs(float(kept.double().mean()) - 0.7) < 0.15


class DropPath(nn.Module):
    """Stochastic depth as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = 0.7 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
        noisy = (x @ self.weight).div(0.7) * kept.floor_() + torch.rand_like(x) + torch.randn_like(x)
        return (x + noisy).square().mean()


def test_numbers_are_drawn_alike_on_ranks() -> None:
    one = Training(DropPath().double(), (x_of(),), seed=3)
    whole = one.whole()
    for mesh, shardings in ((3, {"x": "S[0]"}), (5, {"x": "S[1]"}), (2, {"weight": "S[1]"})):
        for name, found in one.on_ranks(mesh, shardings, tail="pad").items():
            torch.testing.assert_close(found, whole[name])


class Noise(nn.Module):
    """Normal, exponential and uniform numbers, of which none depends on others."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        size, like = (337, 301), x.new_empty(337, 301)
        normal = torch.randn(size, dtype=x.dtype), torch.randn_like(like, dtype=torch.float32)
        drawn = like.clone().normal_(3.0, 2.0), like.clone().exponential_(0.5), like.clone().uniform_(2.0, 5.0)
        return [y + 0.0 * x.sum().to(y.dtype) for y in (*normal, *drawn)]


def test_drawn_numbers_have_their_distributions() -> None:
    imported = import_torch(Noise(), (x_of(),), training=True)
    found = [*interpret(imported.module, {**imported.flatten((x_of(),), {}), "seed": torch.tensor(1)}).values()]
    normal = torch.distributions.Normal(0.0, 1.0)
    levels = [normal.cdf(found[0]), normal.cdf(found[1].double()), normal.cdf((found[2] - 3) / 2),
              1 - torch.exp(-found[3] / 2), (found[4] - 2) / 3]  # fmt: skip
    count = found[0].numel()
    for level in levels:
        # Kolmogorov and Smirnov's distance to the uniform distribution: beyond 2.5 once in 270,000.
        steps = torch.arange(1, count + 1) / count
        assert float((level.flatten().sort().values - steps).abs().max()) < 2.5 / count**0.5
    pairs = torch.corrcoef(torch.stack([level.flatten() for level in levels])) - torch.eye(len(levels))
    assert float(pairs.abs().max()) < 5 / count**0.5


class Counts(nn.Module):
    """Draws numbers that are not derived from uniform ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.poisson(x.exp()).sum()


def test_what_cannot_be_drawn_is_said() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(ImportModelError, match="an input or a weight called 'seed'"):
        import_torch(Seeded(), (x,), training=True)
    with pytest.raises(UnsupportedOpError, match=r"aten\.poisson\.default draws random numbers"):
        import_torch(Counts(), (x,), training=True)
    with pytest.raises(ImportModelError, match="drops 50% at random"):
        import_torch(nn.Dropout(0.5), (x,))


class SelfNormalizing(nn.Module):
    """Alpha dropout of standardized numbers; of whole channels for `features`. The loss keeps all of its results."""

    def __init__(self, features: bool, rate: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.drop = (nn.FeatureAlphaDropout if features else nn.AlphaDropout)(rate)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return (self.drop(self.scale * x) * chosen).sum()


@pytest.mark.parametrize("features", [False, True])
def test_alpha_dropout_keeps_mean_and_variance(features: bool) -> None:
    """Each result is ``a x + b`` or one limit, as in torch, on any number of ranks."""
    rate, x = 0.3, torch.randn(6, 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    limit = -1.7580993408473766
    a = 1 / math.sqrt((limit**2 * rate + 1) * (1 - rate))
    b = -a * limit * rate
    found: dict[str, torch.Tensor] = {}
    for strategy in ("1/1/1/1", "3/1/1/1"):
        model = SelfNormalizing(features, rate).train()
        step = dr.compile_training(
            model, optimizer=dr.optim.SGD(0.0), example_batch=(x, torch.ones_like(x)), strategy=strategy, seed=5
        )
        values = torch.zeros(x.numel(), dtype=torch.float64)
        for number in range(0, x.numel(), 97):
            chosen = torch.zeros_like(x).flatten()
            chosen[number] = 1.0
            values[number] = step((x, chosen.view_as(x)))
            step.steps = 0
        found[strategy] = values[::97]
    torch.testing.assert_close(found["1/1/1/1"], found["3/1/1/1"], rtol=1e-12, atol=1e-12)
    kept, dropped = a * x.flatten()[::97] + b, torch.full_like(found["1/1/1/1"], a * limit + b)
    is_kept = torch.isclose(found["1/1/1/1"], kept)
    assert torch.all(is_kept | torch.isclose(found["1/1/1/1"], dropped))
    assert 0 < int(is_kept.sum()) < len(kept)


def test_alpha_dropout_of_all_is_zero() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    step = dr.compile_training(
        SelfNormalizing(False, 1.0).train(), optimizer=dr.optim.SGD(0.1), example_batch=(x, torch.ones_like(x))
    )
    assert step((x, torch.ones_like(x))) == 0.0
