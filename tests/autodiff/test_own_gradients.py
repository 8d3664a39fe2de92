"""Gradients that models compute themselves: by `torch.autograd.Function`, and gradients of gradients; beside torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import distir_relax as dr
from distir_relax.errors import ImportModelError, UnsupportedOpError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.proof import prove

STRATEGIES = ["1/1/1/1", "3/1/1/1,zero=3", "1/2/1/1", "2/1/1/3,zero=2", "1/1/2/3", "1/1/1/1,checkpoint=block"]


def check(model: nn.Module, batch: Any, strategy: str = "1/1/1/1", loss: Any = None, rtol: float = 1e-5) -> None:
    """Three steps of SGD equal torch's, and the plan is proved."""
    options: dict[str, Any] = {"optimizer": dr.optim.SGD(lr=0.05), "example_batch": batch, "strategy": strategy}
    step = dr.compile_training(copy.deepcopy(model), loss, **options)
    modules = step.plan.modules
    prove(modules["ranked"], modules["distributed"], modules["sharded"], step.plan.imported.module)
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        expected = trained(**batch) if loss is None else loss(trained(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        found = step(batch) if loss is None else step(*batch)
        assert found == pytest.approx(expected.item(), rel=rtol)


class HalfGelu(torch.autograd.Function):
    """A sigmoid's GELU, with half of its gradient, so that another one would be seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(1.702 * x)
        return grad * (s + 1.702 * x * s * (1 - s)) * 0.5


class Rounded(torch.autograd.Function):
    """With `setup_context`, a number among its inputs, and a gradient that is not linear in that of its result."""

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.round(x * scale) / scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.factor = 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.clamp(-0.01, 0.01) * ctx.factor, None


class Product(torch.autograd.Function):
    """Three inputs with gradients, slightly wrong ones, and a result that has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.save_for_backward(x, w)
        count = torch.ones(x.shape[0])
        ctx.mark_non_differentiable(count)
        return x @ w.t() + b, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, of_count: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w * 0.9, grad.t() @ x * 1.1, grad.sum(0)


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(5, 16), nn.Linear(7, 3)
        self.w, self.b = nn.Parameter(0.3 * torch.randn(7, 16)), nn.Parameter(torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Rounded.apply(HalfGelu.apply(self.up(x)), 16.0)
        y, count = Product.apply(h, self.w, self.b)
        return self.last(torch.tanh(Reversed.apply(y))) * count[:, None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 31), nn.Linear(31, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(HalfGelu.apply(self.up(self.norm(x))))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functions_have_the_gradients_of_their_backward(strategy: str) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(5, 16), Block(), Block(), Block(), nn.Linear(16, 3))
    batch = torch.randn(13, 5), torch.randn(13, 3)
    check(blocks, batch, strategy, F.mse_loss)
    if "/2/3" not in strategy:
        check(Functions(), batch, strategy, F.mse_loss)


def test_bloom_trains() -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=61, hidden_size=24, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    ids = torch.randint(0, 61, (4, 9))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    trained = transformers.BloomForCausalLM(config).train()
    step = dr.compile_training(
        copy.deepcopy(trained), optimizer=dr.optim.SGD(lr=0.1), example_batch=batch, strategy="2/1/1/1"
    )
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = trained(**batch).loss
        loss.backward()
        optimizer.step()
        assert step(batch) == pytest.approx(loss.item(), rel=1e-5)


class Twice(torch.autograd.Function):
    """Two results with gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 2 * a + 3 * b


class Dirty(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function(self.linear(x))
        return sum(y.sum() for y in found) if isinstance(found, tuple) else found.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [(Twice.apply, "Twice, a function of several results with gradients"), (Dirty.apply, "mark_dirty")],
)
def test_functions_that_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ImportModelError, match=message) as raised:
        import_torch(Called(function), (torch.randn(3, 5),), training=True)
    assert raised.value.where.startswith("test_own_gradients.py:")


def test_a_stage_that_ends_within_a_function() -> None:
    batch = torch.randn(12, 5), torch.randn(12, 3)
    with pytest.raises(UnsupportedOpError, match=r"a pipeline stage ends within a torch\.autograd\.Function"):
        check(Functions(), batch, "1/1/2/3", F.mse_loss)


class Penalty(nn.Module):
    """A critic's loss with a penalty on its gradients, as WGAN-GP has."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        share = torch.linspace(0, 1, len(real)).view(-1, *[1] * (real.dim() - 1))
        x = (share * real + (1 - share) * fake).requires_grad_(True)
        y = self.net(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True, retain_graph=True)
        penalty = ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return self.net(fake).mean() - self.net(real).mean() + 0.5 * penalty


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.last = nn.Linear(5, 24), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(q, k, v)).mean(1)


def layers(*between: nn.Module) -> nn.Module:
    first, second, third = between
    return nn.Sequential(nn.Linear(5, 16), first, nn.Linear(16, 7), second, nn.Linear(7, 1), third)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8),
        nn.ELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: layers(nn.LeakyReLU(0.2), nn.Tanh(), nn.Identity()), (5,)),
    "norms": (lambda: layers(nn.LayerNorm(16), nn.GELU(), nn.Softplus()), (5,)),
    "softmax": (lambda: layers(nn.Softmax(-1), nn.RMSNorm(7), nn.SiLU()), (5,)),
    "convolutions": (convolutions, (3, 8, 8)),
    "attention": (Attention, (4, 5)),
}


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    batch = {"real": torch.randn(6, *shape), "fake": torch.randn(6, *shape)}
    check(Penalty(make()), batch, rtol=1e-4)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_gradients_of_gradients_on_ranks(strategy: str) -> None:
    torch.manual_seed(0)
    check(Penalty(NETS["layers"][0]()), {"real": torch.randn(7, 5), "fake": torch.randn(7, 5)}, strategy, rtol=1e-4)


class Functional(nn.Module):
    """`torch.func`, of the module's own values too, which count as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        grad = torch.func.grad(lambda t: (self.net(t) * z).sum())(x)
        other, value = torch.func.grad_and_value(lambda t, u: (self.net(t) * u).sum(), argnums=(0, 1))(x, z)
        with_aux, aux = torch.func.grad(lambda t: (self.net(t).sum(), self.net(t).mean()), has_aux=True)(x)
        return (grad**2).mean() + (other[0] * other[1]).mean() + 0.01 * value + (with_aux**2).sum() * aux


def test_functional_gradients() -> None:
    torch.manual_seed(0)
    check(Functional(), {"x": torch.randn(6, 5)})


class InnerStep(nn.Module):
    """A loss after a step of gradient descent, as in MAML."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = dict(self.net.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x[:3],)), y[:3])
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {name: w - 0.3 * grad for (name, w), grad in zip(weights.items(), grads, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, moved, (x[3:],)), y[3:])


def test_a_step_within_a_step() -> None:
    torch.manual_seed(0)
    check(InnerStep(), {"x": torch.randn(7, 5), "y": torch.randn(7, 1)})


class Forces(nn.Module):
    """Forces as derivatives of an energy, in inference."""

    def __init__(self, create_graph: bool = False) -> None:
        super().__init__()
        self.create_graph = create_graph
        self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, positions: torch.Tensor) -> Any:
        positions = positions.requires_grad_(True)
        distances = (positions[:, None] - positions[None]).pow(2).sum(-1)
        energy = self.net(positions).sum() + torch.exp(-distances).sum()
        (grad,) = torch.autograd.grad(energy, positions, create_graph=self.create_graph)
        return energy, -grad


def test_forces() -> None:
    torch.manual_seed(0)
    model, x = Forces().eval(), torch.randn(7, 3)
    plan = dr.compile(model, (x,), mesh=2, shardings={"net.0.weight": "S[0]"})
    for found, expected in zip(plan(x), model(x.clone()), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected.detach(), rtol=1e-5, atol=1e-6)


def unused(y: torch.Tensor) -> torch.Tensor:
    x = torch.ones(5).requires_grad_(True) * y.detach().sum()
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def batched(y: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y, y, torch.ones(2, 3, 5), is_grads_batched=True)[0]


def of_many(y: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y * 2, y)[0]


def of_a_function(y: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(HalfGelu.apply(y).sum(), y, create_graph=True)[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unused, "on which its outputs do not depend"), (batched, "is_grads_batched"),
        (of_many, "of a tensor that is no number, without grad_outputs"),
        (of_a_function, "through a torch.autograd.Function"),
    ],
)  # fmt: skip
def test_gradients_that_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ImportModelError, match=message) as raised:
        import_torch(Called(function), (torch.randn(3, 5),), training=True)
    assert "test_own_gradients.py:" in raised.value.where
