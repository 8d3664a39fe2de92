"""Functions that `torch.export` cannot trace are imported, and train as with torch, on one rank and on three."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import distir_relax as dr
from distir_relax.frontends.torch.importer import import_torch


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 5))


def embedded(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8, **options), nn.Flatten(), nn.Linear(24, 5))


def spectral(*between: nn.Module) -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 5))


def ctc(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    lengths, sizes = torch.tensor([9, 8, 7, 9, 3, 6]), torch.tensor([3, 2, 3, 1, 0, 3])
    return F.ctc_loss(output.log_softmax(-1), target, lengths, sizes, reduction="sum")


def diagonal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output @ output.T).fill_diagonal_(0.5).mean() + F.mse_loss(output, target)


def correlated(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.corrcoef(output).mean() + F.mse_loss(output, target)


def gaussian(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(output, target, output[:, 0].exp(), full=True, eps=0.8)


VECTORS, TARGETS = torch.randn(6, 8), torch.randn(6, 5)
LABELS = torch.tensor([0, 4, 2, 2, 1, 3])
MANY = torch.tensor([[3, 0, -1, 1, 1], [0, -1, 2, 2, 2], [-1] * 5, [4, 3, 2, 1, 0], [2, 2, -1, 0, 0], [1, 4, 0, -1, 3]])
IDS = torch.tensor([[0, 1, 1], [1, 7, 0], [3, 3, 3], [4, 5, 6], [1, 1, 19], [0, 2, 4]])
CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor, Callable[..., Any]]] = {
    "batch norm without a momentum": (
        lambda: layers(nn.BatchNorm1d(16, momentum=None)), VECTORS, LABELS, F.cross_entropy
    ),
    "spectral norm": (spectral, VECTORS, LABELS, F.cross_entropy),
    "gradients by frequency": (lambda: embedded(scale_grad_by_freq=True), IDS, LABELS, F.cross_entropy),
    "gaussian_nll_loss": (layers, VECTORS, TARGETS, gaussian),
    "multi_margin_loss": (layers, VECTORS, LABELS, F.multi_margin_loss),
    "multi_margin_loss of squares": (
        layers, VECTORS, LABELS, lambda y, t: F.multi_margin_loss(y, t, 2, 0.7, torch.arange(1.0, 6))
    ),
    "multilabel_margin_loss": (layers, VECTORS, MANY, F.multilabel_margin_loss),
    "ctc_loss": (lambda: nn.Linear(8, 5), torch.randn(9, 6, 8), 1 + IDS % 4, ctc),
    "fill_diagonal_": (layers, VECTORS, TARGETS, diagonal),
    "corrcoef": (layers, VECTORS, TARGETS, correlated),
}  # fmt: skip


@pytest.mark.drawn(10)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=2"])
@pytest.mark.parametrize("name", CASES)
def test_functions_train_as_with_torch(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    make, x, target, loss = CASES[name]
    model = make().train()
    options: dict[str, Any] = {"optimizer": dr.optim.SGD(lr=0.1), "example_batch": (x, target), "strategy": strategy}
    step = dr.compile_training(copy.deepcopy(model), loss, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = loss(model(x), target)
        expected.backward()
        optimizer.step()
        assert step(x, target) == pytest.approx(expected.item(), rel=2e-5)
    state = {name.removesuffix(".new"): value for name, value in step.plan.session().state().items()}
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(state[buffer], value, rtol=1e-4, atol=1e-6)


class Losses(nn.Module):
    """Losses of CTC that are not summed; the second row has no path."""

    def __init__(self, zero_infinity: bool) -> None:
        super().__init__()
        self.zero_infinity = zero_infinity

    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        lengths, sizes = torch.tensor([5, 2, 4]), torch.tensor([3, 3, 2])
        log_probs = scores.log_softmax(-1)
        return F.ctc_loss(log_probs, targets, lengths, sizes, 2, "none", self.zero_infinity)


@pytest.mark.parametrize("zero_infinity", [True, False])
def test_ctc_without_a_path(zero_infinity: bool) -> None:
    targets = torch.tensor([[0, 0, 1], [1, 3, 1], [3, 3, 3]])
    # The import compares the program's results with the model's.
    import_torch(Losses(zero_infinity), (torch.randn(5, 3, 4), targets), check=True)
