"""Buffers that blocks update in forward: recomputed blocks and microbatches update them once, as torch does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr


class Normed(torch.nn.Module):
    """A block with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(F.relu(self.norm(self.first(x))))
        return x + y


class Counting(torch.nn.Module):
    """A block that divides by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tanh(self.layer(x)) / self.count.clone()
        self.count.add_(1)
        return y


class Averaging(torch.nn.Module):
    """A block that keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return x + torch.tanh(y)


def model(kind: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(kind() for _ in range(3)), torch.nn.Linear(8, 3))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Normed, "2/1/1/1,checkpoint=block"), (Normed, "1/1/1/2,checkpoint=block"),
        (Averaging, "1/1/1/1,checkpoint=block"), (Counting, "1/1/1/2"), (Counting, "1/1/2/2,checkpoint=block"),
        (Counting, "1/2/1/1,checkpoint=block"), (Counting, "1/1/1/1,checkpoint=selective"),
    ],
)  # fmt: skip
def test_buffers_are_those_of_torch(kind: type[torch.nn.Module], strategy: str) -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 3)
    ours, theirs = model(kind), model(kind)
    step = dr.compile_training(
        ours, F.mse_loss, optimizer=dr.optim.SGD(0.1), example_batch=(x, y), strategy=strategy, verify=True
    )
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(theirs(x), y)
        loss.backward()
        optimizer.step()
        assert float(step(x, y)) == pytest.approx(float(loss.detach()), rel=1e-5)
    step.copy_to_model(ours)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)
