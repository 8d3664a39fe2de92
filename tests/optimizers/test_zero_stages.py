"""All optimizers under ZeRO, in float64, on ranks that split the batch, and matrices too: steps as on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distir_relax as dr
from distir_relax.errors import DistIRError, RunError
from tests.optimizers.steps import Perceptron

OPTIMIZERS: tuple[dr.optim.Optimizer, ...] = (
    dr.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    dr.optim.Adam(0.01, amsgrad=True),
    dr.optim.AdamW(0.01),
    dr.optim.RMSprop(0.01, momentum=0.5, centered=True),
    dr.optim.NAdam(0.01, weight_decay=0.1),
    dr.optim.Adadelta(),
    dr.optim.Adagrad(0.1, lr_decay=0.1),
    dr.optim.Adafactor(0.1, weight_decay=0.1),
    dr.optim.Lion(0.01, weight_decay=0.1),
    dr.optim.Groups(
        dr.optim.Lion(0.01),
        {
            "up.weight": dr.optim.Muon(0.1),
            "down.weight": dr.optim.Muon(0.2, nesterov=False),
            "norm.*": dr.optim.SGD(0.3),
        },
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


def steps(optimizer: dr.optim.Optimizer, strategy: str) -> tuple[list[float], Any]:
    """The losses of three steps, and all that the program changes after them."""
    torch.manual_seed(0)
    model = Model()
    data = [(torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)) for _ in range(3)]
    step = dr.compile_training(
        copy.deepcopy(model), F.mse_loss, optimizer=optimizer, example_batch=data[0], clip_norm=0.5, strategy=strategy
    )
    return [step(*batch) for batch in data], step.plan.session().state()


@pytest.mark.drawn(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_steps_are_those_of_one_process(optimizer: dr.optim.Optimizer, zero: int) -> None:
    losses, state = steps(optimizer, f"{3 if zero % 2 else 2}/{1 if zero % 2 else 2}/1/{1 + zero % 2},zero={zero}")
    expected_losses, expected = steps(optimizer, "1/1/1/1")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=1", "2/2/1/2,zero=3", "1/1/2/2"])
@pytest.mark.parametrize(
    "averaging", [dr.optim.EMA(0.75), dr.optim.SWA(start=2, every=3), dr.optim.SWA(start=1)], ids=str
)
def test_averages_of_parameters(averaging: Any, strategy: str) -> None:
    """Against torch's `AveragedModel`, which averages when the test calls it."""
    torch.manual_seed(0)
    model = Model()
    data = [(torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)) for _ in range(6)]
    step = dr.compile_training(
        copy.deepcopy(model), F.mse_loss, optimizer=dr.optim.AdamW(0.05), example_batch=data[0], averaging=averaging,
        strategy=strategy,
    )  # fmt: skip
    is_moving = isinstance(averaging, dr.optim.EMA)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75) if is_moving else None)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for number, (x, target) in enumerate(data, 1):
        step(x, target)
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        if is_moving or (number >= averaging.start and (number - averaging.start) % averaging.every == 0):
            averaged.update_parameters(model)
    for found, expected in ((step.parameters(averaged=True), averaged.module), (step.parameters(), model)):
        torch.testing.assert_close(found, dict(expected.named_parameters()), rtol=1e-10, atol=1e-12)


def test_averages_that_are_not_kept() -> None:
    step = dr.compile_training(
        Model(),
        F.mse_loss,
        optimizer=dr.optim.SGD(),
        example_batch=(torch.ones(2, 5).double(), torch.ones(2, 3).double()),
    )
    with pytest.raises(RunError, match="keeps no averages"):
        step.parameters(averaged=True)
    for make in (lambda: dr.optim.EMA(1.0), lambda: dr.optim.SWA(0), lambda: dr.optim.SWA(1, 0)):
        with pytest.raises(DistIRError, match="expected"):
            make()
