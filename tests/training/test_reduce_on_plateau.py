"""Learning rates that follow a metric: those of torch's scheduler, in the steps of runs, resumed and under mpirun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

import distir_relax as dr
from distir_relax.errors import RunError
from tests.runtime.processes import mpirun
from tests.training import data, observers

METRICS = [5.0, 4.0, 4.0, 3.9999, 4.2, 4.1, 4.0, 3.0, 3.5, 3.5, 3.5, 3.5, 2.0, 2.5, 2.5, 2.5, 2.5, -1.0, -0.95, -1.0]


def step(strategy: str = "2/1/1/1") -> dr.TrainingStep:
    torch.manual_seed(0)
    model, example = nn.Linear(5, 3), (torch.randn(11, 5), torch.randn(11, 3))
    optimizer = dr.optim.Groups(dr.optim.SGD(dr.lr.StepDecay(0.4, 7, 0.5)), {"bias": dr.optim.SGD(0.1)})
    return dr.compile_training(
        model, mse_loss, optimizer=optimizer, example_batch=example, strategy=strategy, metrics={}
    )


@pytest.mark.parametrize(
    "options",
    [{"patience": 2}, {"patience": 0, "factor": 0.5, "cooldown": 2}, {"patience": 1, "factor": 0.5, "mode": "max"},
     {"patience": 1, "threshold": 0.3}],
)  # fmt: skip
def test_rates_are_those_of_torch(options: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, **options)
    callback = dr.callbacks.ReduceOnPlateau(**options)
    for value in METRICS:
        scheduler.step(value)
        callback.observe(value, "steps")
        assert callback.rate_factor == pytest.approx(optimizer.param_groups[0]["lr"])


def test_a_run_has_the_rates_and_a_resumed_one_continues(tmp_path: Path) -> None:
    """The parameters are those of a loop of torch whose rates are reduced after the same evaluations."""

    def evaluate(number: int) -> dict[str, float]:
        return {"score": METRICS[number - 1]}

    def reducing() -> dr.Callback:
        return dr.callbacks.ReduceOnPlateau("score", 0.5, patience=1)

    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.4}, {"params": [model.bias], "lr": 0.1}])
    plateau = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(plateau, factor=0.5, patience=1)
    for number in range(12):
        x, target = data.drawn(number)
        factor = plateau.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = dr.lr.StepDecay(0.4, 7, 0.5)(number) * factor
        optimizer.param_groups[1]["lr"] = 0.1 * factor
        optimizer.zero_grad()
        mse_loss(model(x), target).backward()
        optimizer.step()
        scheduler.step(METRICS[number])
    assert factor < 0.3
    compiled, calls = step(), observers.Calls()
    options: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": 1, "checkpoint": tmp_path}
    dr.train(compiled, data.batches, steps=7, callbacks=[reducing(), calls], **options)
    resumed = step()
    dr.train(resumed, data.batches, steps=12, callbacks=[reducing(), calls], resume="last", **options)
    for name, expected in model.named_parameters():
        torch.testing.assert_close(resumed.parameters()[name], expected.detach(), rtol=1e-5, atol=1e-6)
    assert calls.results[11].rates["learning_rate.1"] == pytest.approx(0.1 * factor)


@pytest.mark.mpirun
def test_all_ranks_have_the_rates(tmp_path: Path) -> None:
    """Without evaluations the metric is the loss of each step; samples of a data set are read by each rank."""
    bundle = step().save(tmp_path / "step.dist", ("torch",))
    file = tmp_path / "plateau.py"
    file.write_text(
        "import distir_relax as dr\n\n"
        "def callbacks():\n    return dr.callbacks.ReduceOnPlateau(factor=0.5, patience=0, threshold=0.2)\n"
    )
    command = ["-m", "distir_relax", "train", bundle, "--data", f"{data.__file__}:samples", "--steps", 9]
    done = mpirun(2, *command, "--callbacks", f"{file}:callbacks", "--log", tmp_path / "ranks.jsonl")
    assert done.returncode == 0, done.stderr
    compiled = step()
    log = dr.callbacks.JSONLogger(tmp_path / "threads.jsonl")
    reducing = dr.callbacks.ReduceOnPlateau(factor=0.5, patience=0, threshold=0.2)
    dr.train(compiled, data.samples(), steps=9, callbacks=[log, reducing])
    found, expected = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("ranks.jsonl", "threads.jsonl")
    )
    for name in ("loss", "learning_rate", "learning_rate.1"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-5)
    assert found[-1]["learning_rate.1"] < 0.05


def test_options_and_states_that_are_refused() -> None:
    for options, message in (
        ({"factor": 1.5}, "expected factors below 1"), ({"patience": -1}, "expected numbers of at least 0"),
        ({"mode": "most"}, "expected the mode min or max"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=message):
            dr.callbacks.ReduceOnPlateau(**options)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="expected metric, best, count, waits and rate_factor"):
        dr.callbacks.ReduceOnPlateau().load_state_dict({"count": 3})
    other = dr.callbacks.ReduceOnPlateau("score")
    with pytest.warns(UserWarning, match="ReduceOnPlateau begins anew: it observed loss:min of steps"):
        other.load_state_dict(dr.callbacks.ReduceOnPlateau().state_dict() | {"rate_factor": 0.1})
    assert other.rate_factor == 1.0
    with pytest.raises(RunError, match="expected the metric loss in a run without evaluations"):
        dr.train(step(), data.batches, steps=2, callbacks=[dr.callbacks.ReduceOnPlateau("score")])
