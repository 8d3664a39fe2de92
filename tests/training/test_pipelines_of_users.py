"""Pipelines and microbatches of models as users write them: frozen stages, counters, tied weights, dropout, tables."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr

ROWS = 12


def batch(columns: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(7)
    x, y = (torch.randn(ROWS, n, dtype=torch.float64, generator=drawn) for n in (5, columns))
    return x, y


def trains_as_torch(
    model: nn.Module, ours: Any, theirs: Any, strategy: str, data: Any = None, backend: str = "torch", **options: Any
) -> dr.TrainingStep:
    """Three steps of `model` have torch's losses, and leave its parameters."""
    x, y = data or batch()
    own = copy.deepcopy(model)
    optimizer = theirs(p for p in own.parameters() if p.requires_grad)
    step = dr.compile_training(
        model, F.mse_loss, optimizer=ours, example_batch=(x, y), strategy=strategy, verify=True, **options
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(own(x), y)
        loss.backward()
        optimizer.step()
        assert step(x, y, backend=backend) == pytest.approx(loss.item(), rel=1e-9)
    found = step.parameters(backend)
    torch.testing.assert_close(found, {n: p.detach() for n, p in own.named_parameters()}, rtol=1e-8, atol=1e-8)
    return step


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).double()


OPTIMIZERS = [
    (dr.optim.Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    (dr.optim.AdamW(lr=0.1, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
    (
        dr.optim.SGD(lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS, ids=["adam", "adamw", "sgd"])
@pytest.mark.parametrize("strategy", ["1/1/3/3", "1/1/3/1,schedule=zb-v,chunks=2", "2/1/2/3,zero=1"])
def test_a_frozen_first_stage(ours: Any, theirs: Any, strategy: str) -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    trains_as_torch(model, ours, theirs, strategy)


class Counting(nn.Module):
    """Counts its calls in a buffer, which the result depends on in a late stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layers(x) * self.calls


@pytest.mark.drawn(1)
@pytest.mark.parametrize("backend", ["torch", "tvm"])
@pytest.mark.parametrize("strategy", ["1/1/2/3", "1/1/3/1"])
def test_a_buffer_written_in_forward(strategy: str, backend: str) -> None:
    model, (x, _) = Counting(), batch()
    plan = dr.compile(model, (x,), strategy=strategy, verify=True)
    base = copy.deepcopy(model).layers(x).detach()
    for call in range(1, 4):
        torch.testing.assert_close(plan(x, backend=backend), base * call)
    sgd = dr.optim.SGD(lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01)
    step = trains_as_torch(Counting(), *sgd, strategy, backend=backend)
    assert step.plan.session(backend).state()["calls"] == 3


class Tied(nn.Module):
    """A transposed weight in the last stage is that of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
        self.layer = nn.Linear(7, 7).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(F.linear(x, self.weight))))
        return F.linear(hidden, self.weight.t())


@pytest.mark.parametrize("strategy", ["1/1/2/1", "1/1/3/2", "1/2/2/3", "1/2/1/1", "1/3/1/1", "2/2/1/1,zero=1"])
def test_a_transposed_tied_weight(strategy: str) -> None:
    x, y = batch(5)
    model = Tied()
    torch.testing.assert_close(dr.compile(model, (x,), strategy=strategy, verify=True)(x), model(x).detach())
    trains_as_torch(model, dr.optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), strategy, (x, y))
    trains_as_torch(model, dr.optim.AdamW(lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1), strategy, (x, y))


class TiedTwice(Tied):
    """A tied weight, with a square one between whose dims are both tied to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.layer(F.linear(x, self.weight))), self.weight.t())


@pytest.mark.parametrize("strategy", ["1/2/1/1", "1/3/1/1"])
def test_states_are_placed_as_their_weights(strategy: str) -> None:
    trains_as_torch(TiedTwice(), dr.optim.AdamW(lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1), strategy, batch(5))


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(7, 11), nn.Dropout(rate), nn.Linear(11, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Blocks(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(4))
        self.double().train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def with_dropout(strategy: str, rate: float = 0.3, **options: Any) -> tuple[list[float], dr.TrainingStep]:
    data = batch()
    step = dr.compile_training(
        Blocks(rate),
        F.mse_loss,
        optimizer=dr.optim.AdamW(lr=0.01),
        example_batch=data,
        strategy=strategy,
        seed=3,
        verify=True,
        **options,
    )
    return [step(*data) for _ in range(3)], step


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("1/1/2/3", {}),
        ("1/1/3/5", {}),
        ("1/1/2/3", {"stages": ("blocks.2",)}),
        ("1/1/2/4,schedule=zb-v,chunks=2", {}),
        ("2/1/2/3,checkpoint=block", {}),
        ("1/2/2/2", {"outline": False}),
        ("1/1/1/4", {}),
    ],
)
def test_dropout_in_repeated_blocks(strategy: str, options: Any) -> None:
    """Masks are those of one rank, stages are cut and bytes are sent as without dropout."""
    expected, _ = with_dropout("1/1/1/1")
    found, step = with_dropout(strategy, **options)
    assert found == pytest.approx(expected, rel=1e-12)
    if not options.get("outline", True):
        # Op by op the cost of dropout is part of where stages are cut.
        return
    _, without = with_dropout(strategy, rate=0.0, **options)
    ours, theirs = step.plan.footprint, without.plan.footprint
    assert ours.weights == theirs.weights
    # Each stage passes on a seed of 8 bytes for each microbatch.
    microbatches = int(strategy.split(",")[0].split("/")[3])
    for mine, other in zip(ours.sent, theirs.sent, strict=True):
        assert other <= mine <= other + 8 * microbatches * 2


class Table(nn.Module):
    """A table of which as many rows are used as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(20, 7, dtype=torch.float64))
        self.first, self.last = nn.Linear(5, 7).double(), nn.Linear(7, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) + self.table[: x.shape[0]]))


class Differences(Table):
    """Neighbouring samples meet in a window over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(torch.tanh(y - torch.cat([y[1:], y[:1]]) + F.pad(y[1:-1], (0, 0, 1, 1))))


@pytest.mark.parametrize("kind", [Table, Differences])
@pytest.mark.parametrize("strategy", ["1/1/1/5", "1/1/2/3", "2/1/1/2", "3/1/1/1"])
def test_a_table_sliced_by_the_batch(kind: type[Table], strategy: str) -> None:
    model, (x, _) = kind(), batch()
    torch.testing.assert_close(dr.compile(model, (x,), strategy=strategy, verify=True)(x), model(x).detach())
    trains_as_torch(model, dr.optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), strategy)
