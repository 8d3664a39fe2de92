"""All optimizers under ZeRO, in float64, on ranks that split the batch, and matrices too: steps as on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import distir_relax as dr
from tests.optimizers.steps import Perceptron

OPTIMIZERS: tuple[dr.Optimizer, ...] = (
    dr.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    dr.Adam(0.01, amsgrad=True),
    dr.AdamW(0.01),
    dr.RMSprop(0.01, momentum=0.5, centered=True),
    dr.Adagrad(0.1, lr_decay=0.1),
    dr.Adafactor(0.1, weight_decay=0.1),
    dr.Lion(0.01, weight_decay=0.1),
    dr.Groups(
        dr.Lion(0.01), {"up.weight": dr.Muon(0.1), "down.weight": dr.Muon(0.2, nesterov=False), "norm.*": dr.SGD(0.3)}
    ),
)


class Model(torch.nn.Module):
    """The perceptron without its loss."""

    def __init__(self) -> None:
        super().__init__()
        inner = Perceptron()
        self.up, self.norm, self.down = inner.up, inner.norm, inner.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


def steps(optimizer: dr.Optimizer, strategy: str) -> tuple[list[float], Any]:
    """The losses of three steps, and all that the program changes after them."""
    torch.manual_seed(0)
    model = Model()
    data = [(torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)) for _ in range(3)]
    step = dr.compile_training(
        copy.deepcopy(model), F.mse_loss, optimizer=optimizer, example_batch=data[0], clip_norm=0.5, strategy=strategy
    )
    return [step(*batch) for batch in data], step.plan.session().state()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_steps_are_those_of_one_process(optimizer: dr.Optimizer, zero: int) -> None:
    losses, state = steps(optimizer, f"{3 if zero % 2 else 2}/{1 if zero % 2 else 2}/1/{1 + zero % 2},zero={zero}")
    expected_losses, expected = steps(optimizer, "1/1/1/1")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)
