"""Runs of epochs: their number, partial last batches, intervals and learning rates by epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.checkpoints import latest, saved_steps
from distir_relax.cli.app import app
from distir_relax.errors import DistIRError, RunError
from distir_relax.support import Fields
from distir_relax.support.learning_rate import schedule_from_json, schedule_to_json
from tests.training import data, observers
from tests.training.data import Batch

COUNT = 37


class Table(Dataset[Batch]):
    """37 samples: three batches of 11 and a rest of 4."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Batch:
        x = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return x, 2 * x[:3]


def compiled(rows: int = 11, dynamic: bool = False, **options: Any) -> dr.TrainingStep:
    torch.manual_seed(0)
    example = torch.randn(rows, 5), torch.randn(rows, 3)
    options = {"optimizer": dr.optim.SGD(0.1), "metrics": {}, "strategy": "2/1/1/1"} | options
    dims: dict[str, Any] = {"dynamic_shapes": {"input": {0: "batch"}, "targets": {0: "batch"}}} if dynamic else {}
    return dr.compile_training(nn.Linear(5, 3), mse_loss, example_batch=example, **dims, **options)


def batches(rows: int) -> list[Batch]:
    rest = [Table()[index] for index in range(COUNT)]
    parts = (rest[start : start + rows] for start in range(0, COUNT, rows))
    return [tuple(map(torch.stack, zip(*part, strict=True))) for part in parts]  # type: ignore[misc]


SOURCES: dict[str, Callable[[bool], Any]] = {
    "a data set": lambda partial: Table(),
    "a loader": lambda partial: DataLoader(Table(), 11, shuffle=True, drop_last=not partial),
    "a list": lambda partial: batches(11) if partial else batches(11)[:3],
    "a function": lambda partial: lambda: batches(11) if partial else batches(11)[:3],
}


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("name", SOURCES)
def test_epochs_evaluations_and_checkpoints(name: str, partial: bool, tmp_path: Path) -> None:
    """With the last batch of 4 samples if the step takes any number, without it otherwise."""
    step, calls = compiled(dynamic=partial), observers.Calls()
    size = 4 if partial else 3
    options: dict[str, Any] = {"every": "epoch", "evaluate_every": "epoch", "evaluation": data.held_out, "keep": 9}
    ended = dr.train(step, SOURCES[name](partial), epochs=3, checkpoint=tmp_path, callbacks=[calls], **options)
    assert (ended.step, ended.steps, step.steps) == (3 * size, 3 * size, 3 * size)
    assert [*calls.metrics] == saved_steps(tmp_path) == [size, 2 * size, 3 * size]
    assert sum(result.work for result in calls.results) == 3 * (COUNT if partial else 33)
    assert latest(tmp_path).position.data.epoch == 2


def test_epochs_with_a_partial_batch_are_those_of_torch() -> None:
    step, expected = compiled(dynamic=True), nn.Linear(5, 3)
    expected.load_state_dict(step.parameters())
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    for _ in range(2):
        for x, target in batches(11):
            optimizer.zero_grad()
            mse_loss(expected(x), target).backward()
            optimizer.step()
    dr.train(step, batches(11), epochs=2)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(step.parameters()[name], value.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["a data set", "a loader"])
def test_a_resumed_run_makes_the_rest_of_its_epochs(name: str, tmp_path: Path) -> None:
    """After 4 batches of 11, that is one epoch and 11 samples: 26 are left, 6 batches of 4, and 9 of the last epoch."""
    source = SOURCES[name](False)
    dr.train(compiled(), source, steps=4, checkpoint=tmp_path)
    other = DataLoader(Table(), 4, shuffle=True, drop_last=True) if name == "a loader" else source
    four = compiled(4)
    assert dr.train(four, other, epochs=3, checkpoint=tmp_path, resume="last").step == 4 + 6 + 9
    # Another call of the same step counts its epochs, too.
    assert dr.train(four, other, epochs=4).step == 4 + 6 + 9 + 9
    with pytest.warns(UserWarning, match="no step is left: 28 of 28"):
        dr.train(four, other, epochs=4)


def test_epochs_on_the_command_line(tmp_path: Path) -> None:
    path = compiled().save(tmp_path / "step.dist", ("torch",))
    command = ["train", str(path), "--data", f"{data.__file__}:samples", "--checkpoint", str(tmp_path / "ck")]
    command += ["--every", "epoch", "--evaluation", f"{data.__file__}:held_out", "--evaluate-every", "epoch"]
    done = CliRunner().invoke(app, [*command, "--epochs", "2", "--log", str(tmp_path / "run.csv")])
    assert done.exit_code == 0, done.output
    assert "trained to step 6 of 6" in done.output
    assert saved_steps(tmp_path / "ck") == [3, 6]
    assert (tmp_path / "run.csv").read_text().count("\n") == 1 + 6 + 2
    done = CliRunner().invoke(app, [*command, "--epochs", "3", "--resume"])
    assert "trained to step 9 of 9" in done.output


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (data.epoch, {"epochs": 2}, "expected data with a number of batches in an epoch, found none"),
        (data.batches, {"epochs": 2}, "expected data with a number of batches in an epoch, found none"),
        (data.batches, {"steps": 2, "evaluate_every": "epoch"}, "expected data of epochs, found a function"),
        ([], {"epochs": 2}, "expected batches, found none"),
        (Table(), {"steps": 2, "epochs": 2}, "found 2 steps and 2 epochs"),
        (Table(), {}, "found 0 steps and 0 epochs"),
        (Table(), {"epochs": -1}, "found 0 steps and -1 epochs"),
        (Table(), {"epochs": 1, "every": "epochs"}, "expected 1 or more, or epoch, found 'epochs'"),
    ],
)
def test_epochs_that_are_not_known_are_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        dr.train(compiled(), source, **options)


def test_an_interval_of_epochs_needs_no_length(tmp_path: Path) -> None:
    """The end of an iterator is seen when it comes."""
    calls = observers.Calls()
    dr.train(
        compiled(), data.epoch, steps=12, evaluation=data.held_out, evaluate_every="epoch", callbacks=[calls],
        checkpoint=tmp_path, every="epoch",
    )  # fmt: skip
    assert [*calls.metrics] == saved_steps(tmp_path) == [5, 10, 12]


def test_rates_by_epoch() -> None:
    schedule = dr.lr.ByEpoch(dr.lr.StepDecay(0.4, every=1, factor=0.5), 3)
    calls = observers.Calls()
    dr.train(compiled(optimizer=dr.optim.SGD(schedule)), Table(), epochs=3, callbacks=[calls])
    assert [result.rates["learning_rate"] for result in calls.results] == [0.4] * 3 + [0.2] * 3 + [0.1] * 3
    table = Fields.of(schedule_to_json(schedule), DistIRError)
    assert schedule_from_json(table) == schedule
    for wrong in (0.1, schedule, dr.lr.StepDecay):
        with pytest.raises(DistIRError, match="expected a schedule of steps to count epochs"):
            dr.lr.ByEpoch(wrong, 3)  # type: ignore[arg-type]


def test_flags_that_limit_and_order_a_run(tmp_path: Path) -> None:
    """Epochs of two of three batches in order, evaluations of one of two, the best weights at the end."""
    path = compiled().save(tmp_path / "step.dist", ("torch",))
    command = ["train", str(path), "--data", f"{data.__file__}:loader", "--evaluation", f"{data.__file__}:held_out"]
    flags = ["--limit-batches", "0.7", "--in-order", "--limit-evaluation-batches", "1", "--evaluate-every", "1"]
    folder = tmp_path / "ck"
    best = ["--best", "loss", "--load-best", "--checkpoint", str(folder), "--every", "1", "--keep", "9"]
    log = tmp_path / "run.jsonl"
    done = CliRunner().invoke(app, [*command, *flags, *best, "--epochs", "2", "--log", str(log)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 4
    again = compiled()
    assert [row["loss"] for row in steps[:2]] == pytest.approx([again(*batch) for batch in batches(11)[:2]], rel=1e-5)
    again = compiled()
    again(*batches(11)[0])
    evaluated = [row for row in rows if "evaluation/loss" in row]
    assert evaluated[0]["evaluation/loss"] == pytest.approx(again.evaluate([data.held_out()[0]])["loss"], rel=1e-4)
    late = CliRunner().invoke(app, [*command, "--epochs", "9", "--max-time", "0.001"])
    assert "the limit of 0.001 seconds is reached" in late.output
    for flag, text in (("--limit-batches", "many"), ("--limit-batches", "0"), ("--max-time", "0")):
        failed = CliRunner().invoke(app, [*command, "--epochs", "1", flag, text])
        assert failed.exit_code
        assert isinstance(failed.exception, DistIRError)
