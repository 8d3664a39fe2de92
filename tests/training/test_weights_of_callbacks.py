"""Callbacks that receive the weights and replace them, as a loop of torch that clamps weights after each step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distir_relax as dr
from distir_relax.errors import RunError
from tests.runtime.processes import mpirun
from tests.training import data, observers, perceptron


def by_torch(steps: int) -> tuple[list[float], torch.nn.Module]:
    torch.manual_seed(0)
    model, losses = perceptron.Perceptron(), []
    optimizer = torch.optim.AdamW(model.parameters())
    rate, batches = dr.lr.Cosine(2.0**-5, 20, 3), data.batches()
    for step in range(1, steps + 1):
        x, target = next(batches)
        optimizer.param_groups[0]["lr"] = rate(step - 1)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 2 == 0:
            with torch.no_grad():
                model.up.weight.clamp_(-observers.LIMIT, observers.LIMIT)
    return losses, model


@pytest.mark.parametrize("strategy", ["1/1/1/1", "3/1/1/1,zero=3", "1/2/1/1"])
def test_weights_are_those_of_torch(strategy: str) -> None:
    losses, model = by_torch(7)
    step, callback = perceptron.step(strategy), observers.Clamp()
    dr.train(step, data.batches, steps=7, callbacks=[callback])
    assert callback.steps == [2, 4, 6]
    assert callback.losses == pytest.approx(losses, rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.mpirun
def test_weights_of_processes(tmp_path: Path) -> None:
    losses, _ = by_torch(5)
    perceptron.step("3/2/1/1,zero=3").save(tmp_path / "m.dist", backends=("torch",))
    log = tmp_path / "run.csv"
    run = mpirun(
        6, "-m", "distir_relax", "train", tmp_path / "m.dist", "--data", f"{data.__file__}:batches", "--steps", 5,
        "--callbacks", f"{observers.__file__}:clamp", "--log", log,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert [float(row["loss"]) for row in csv.DictReader(log.open())] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"up.wight": torch.ones(7, 5)}, "expected tensors by the names of weights, found 'up.wight'"),
        ({"up.bias": torch.ones(5)}, r"expected \(7,\) for 'up.bias', found \(5,\)"),
    ],
)
def test_results_that_do_not_fit_are_errors(result: Any, message: str) -> None:
    class Wrong(dr.Callback):
        weights_every = 1

        def weights(self, step: int, tensors: dict[str, torch.Tensor]) -> Any:
            return result

    with pytest.raises(RunError, match=message):
        dr.train(perceptron.step("1/1/1/1"), data.batches, steps=2, callbacks=[Wrong()])
