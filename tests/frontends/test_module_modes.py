"""Warnings of models that are compiled for training in evaluation mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr


class Attention(nn.Module):
    """Dropout by a function, whose rate is an attribute, as in transformers."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.linear, self.attention_dropout = nn.Linear(5, 5), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), self.attention_dropout, self.training)


class Noisy(nn.Module):
    """Dropout by a function, whose rate is a number in the code."""

    def __init__(self, function: Callable[..., torch.Tensor] = F.dropout) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(5, 5), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), 0.5, self.training)


class Headed(nn.Module):
    """A part in evaluation mode, and a head in training mode."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3)).eval(), nn.Linear(5, 5)
        self.body.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Wrapped(Headed):
    """A part in evaluation mode with such a call, in a model in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), Noisy()).eval()


def with_fixed_statistics() -> nn.Module:
    """Batch norms in evaluation mode, in a model that is not: a choice."""
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model[1].eval()
    return model


WARNED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1)).eval(), "Sequential is .*'1' and 0 more"),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).eval(), "Sequential is in evaluation mode"),
    "function": (lambda: nn.Sequential(Attention(0.1), Attention(0.2)).eval(), "'0' and 1 more layers"),
    "rate in the code": (lambda: Noisy().eval(), "Noisy is in evaluation mode.*'Noisy' and 0 more layers"),
    "other functions": (lambda: nn.Sequential(Noisy(F.alpha_dropout)).eval(), "Sequential is .*'0' and 0 more"),
    "rate in a part": (Wrapped, "body is in evaluation mode.*'body.1' and 0 more"),
    "part": (Headed, "body is in evaluation mode.*'body.1'"),
}
ACCEPTED: dict[str, Callable[[], nn.Module]] = {
    "no dropout": lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.0), Attention(0.0), nn.LayerNorm(5)).eval(),
    "rate in the code": lambda: nn.Sequential(Noisy()).train(),
    "training": lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1)).train(),
    "frozen part": lambda: Headed(frozen=True),
    "fixed statistics": with_fixed_statistics,
}


def compiled(model: nn.Module) -> dr.TrainingStep:
    batch = torch.ones(3, 5), torch.zeros(3, 5)
    return dr.compile_training(model, F.mse_loss, optimizer=dr.optim.SGD(0.1), example_batch=batch)


@pytest.mark.parametrize("name", WARNED)
def test_evaluation_mode_is_warned_of(name: str) -> None:
    model, message = WARNED[name]
    with pytest.warns(UserWarning, match=message):
        compiled(model())


@pytest.mark.parametrize("name", ACCEPTED)
def test_mode_that_is_meant_is_accepted(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled(ACCEPTED[name]())
