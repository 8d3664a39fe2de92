"""`dr.train`: the loop in a Python program, and the kinds of data that it takes."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import Manifest
from distir_relax.checkpoints import DataPosition
from distir_relax.cli.app import app
from distir_relax.cli.training_data import load_data
from distir_relax.errors import CheckpointError, RunError
from distir_relax.runtime import launch
from distir_relax.runtime.training.data_loader import LoaderEpochs
from distir_relax.runtime.training.data_sources import open_data
from tests.training import data, observers, perceptron
from tests.training.data import ROWS, Batch, drawn

pytestmark = pytest.mark.timeout(120)


class Table(Dataset[Batch]):
    """47 samples, of four batches and a rest. It keeps the indices that are read, and draws noise for each."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Batch:
        self.read.append(index)
        x = torch.randn(5, generator=torch.Generator().manual_seed(index)) + torch.rand(5) / 64
        return x, 2 * x[:3]


class Streamed(IterableDataset[Batch]):
    """Three batches of samples in a fixed order."""

    def __iter__(self) -> Iterator[Batch]:
        for number in range(3):
            yield from zip(*drawn(number), strict=True)


def indexed(**options: Any) -> DataLoader[Any]:
    """A loader of the table."""
    return DataLoader(Table(), **({"batch_size": ROWS, "drop_last": True} | options))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: indexed(shuffle=True),
    "in order": indexed,
    "a generator": lambda: indexed(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "a sampler": lambda: indexed(sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 15, 40)),
    "a batch sampler": lambda: DataLoader(Table(), batch_sampler=BatchSampler(RandomSampler(range(33)), ROWS, True)),
    "whole batches": lambda: DataLoader([drawn(i) for i in range(5)], batch_size=None, shuffle=True),  # type: ignore[arg-type]
    "workers": lambda: indexed(shuffle=True, num_workers=2, persistent_workers=True),
    "a stream": lambda: DataLoader(Streamed(), batch_size=ROWS),
}


def batches(loader: DataLoader[Any], start: int, number: int, seed: int = 7) -> list[torch.Tensor]:
    """Inputs of batches of a run that starts with one of them."""
    epochs, found = LoaderEpochs(loader, seed, ROWS), []
    at = DataPosition(start)
    while len(found) < number:
        items, at = epochs.begin(at)
        for item in itertools.islice(items, number - len(found)):
            found.append(item[0])
            at = at.after(len(item[0]))
        at = at.next_epoch()
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_continues_with_the_batches_of_the_step(name: str) -> None:
    before = torch.get_rng_state()
    whole = batches(LOADERS[name](), 0, 12)
    assert torch.equal(torch.get_rng_state(), before)
    for start in (3, 7):
        torch.rand(start)
        found = batches(LOADERS[name](), start, 12 - start)
        # Random numbers of workers start again with the run.
        tolerance = 2**-6 if name == "workers" else 0
        torch.testing.assert_close(torch.stack(found), torch.stack(whole[start:]), rtol=0, atol=tolerance)
    # A generator of the user's decides alone.
    if name not in ("in order", "a stream", "a generator"):
        other = batches(LOADERS[name](), 0, 5, seed=8)
        assert not torch.allclose(torch.stack(other), torch.stack(whole[:5]), atol=2**-5)


def test_batches_before_the_first_step_are_not_loaded() -> None:
    table = Table()
    loader = DataLoader(table, batch_size=ROWS, shuffle=True, drop_last=True)
    batches(loader, 0, 8)
    whole, table.read = table.read, []
    batches(loader, 6, 2)
    assert table.read == whole[6 * ROWS :]
    # An epoch has each sample at most once, the next one another order.
    assert len(set(whole[: 4 * ROWS])) == 4 * ROWS
    assert whole[: 4 * ROWS] != whole[4 * ROWS :]


def test_a_training_step_is_trained_as_by_calls(tmp_path: Path) -> None:
    by_calls, step = perceptron.step("3/1/1/1"), perceptron.step("3/1/1/1")
    losses = [by_calls(*drawn(number)) for number in range(9)]
    calls = observers.Calls()
    items = [drawn(number) for number in range(9)]
    step(*items[0])
    options: dict[str, Any] = {"checkpoint": tmp_path, "callbacks": [calls]}
    ended = dr.train(step, items, steps=5, **options)
    assert (ended.step, step.steps) == (5, 5)
    ended = dr.train(step, items, steps=7, resume="last", **options)
    assert (ended.step, step.steps) == (7, 7)
    # Another object continues the run: the learning rates, too, are those of the steps.
    other = perceptron.step("2/1/1/1")
    dr.train(other, items, steps=9, resume="last", **options)
    assert other.steps == 9
    assert [result.loss for result in calls.results] == pytest.approx(losses[1:], rel=1e-5)
    for name, value in by_calls.parameters().items():
        torch.testing.assert_close(other.parameters()[name], value, rtol=1e-4, atol=1e-6)
    # It trains on, by calls too.
    torch.testing.assert_close(other(*drawn(9)), by_calls(*drawn(9)), rtol=1e-4, atol=0)


def test_a_run_is_evaluated_on_data() -> None:
    step, by_calls = (perceptron.step(strategy, evaluates=True) for strategy in ("3/1/1/1", "2/1/1/1"))
    held_out = data.held_out()
    samples = TensorDataset(*map(torch.cat, zip(*held_out, strict=True)))
    sources: list[Any] = [held_out, data.held_out, lambda: iter(held_out)]
    for source in (*sources, DataLoader(samples, batch_size=ROWS, shuffle=True), samples):
        calls, last = observers.Calls(), step.steps + 3
        done = dr.train(step, data.batches, steps=last, callbacks=[calls], evaluation=source, evaluate_every=2)
        assert done.step == last
        for number in range(last - 3, last):
            by_calls(*drawn(number))
            if (number + 1) % 2 == 0 or number + 1 == last:
                expected = by_calls.evaluate(held_out)
                assert calls.metrics[number + 1] == pytest.approx(expected, rel=1e-4)
    calls, averages = observers.Calls(), perceptron.step("2/1/1/1", evaluates=True, averaging=dr.optim.EMA(0.5))
    dr.train(averages, data.batches, steps=3, callbacks=[calls], evaluation=held_out, averaged=True)
    assert calls.metrics[3] == pytest.approx(averages.evaluate(held_out, averaged=True), rel=1e-4)
    assert calls.metrics[3] != pytest.approx(averages.evaluate(held_out), rel=1e-4)
    with pytest.raises(RunError, match="the bundle has no evaluation"):
        dr.train(perceptron.step("1/1/1/1"), data.batches, steps=3, evaluation=held_out)
    with pytest.raises(RunError, match="found both"):
        dr.train(step, data.batches, steps=3, evaluation=held_out, evaluate=step.evaluate)  # type: ignore[arg-type]


def test_data_without_a_batch_to_evaluate_are_refused_before_the_first_step() -> None:
    step, calls = perceptron.step("2/1/1/1", evaluates=True), observers.Calls()
    none = TensorDataset(torch.ones(0, 5), torch.ones(0, 3))
    few = TensorDataset(*(x[: ROWS - 1] for x in drawn(0)))
    loaders = DataLoader(few, batch_size=ROWS, drop_last=True), DataLoader(none, batch_size=ROWS)
    for source in ([], lambda: [], lambda: iter([]), none, *loaders, lambda: loaders[0]):
        with pytest.raises(RunError, match="the evaluation data: expected batches to evaluate, found none"):
            dr.train(step, data.batches, steps=3, callbacks=[calls], evaluation=source, evaluate_every=2)
    assert step.steps == 0
    ended = dr.train(step, data.batches, steps=3, evaluation=few, evaluate_every=3)
    assert ended.step == 3


@pytest.mark.sweep
def test_files_of_a_resumed_run_are_closed(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for steps in (1, 2, 3):
            dr.train(perceptron.step("2/1/1/1"), data.batches, steps=steps, checkpoint=tmp_path, resume="auto")
            gc.collect()
    assert [str(item.message) for item in caught if item.category is ResourceWarning] == []


def test_kinds_of_data_give_the_same_run(tmp_path: Path) -> None:
    path = perceptron.saved("2/1/1/1", tmp_path)
    items = [drawn(number) for number in range(5)]
    sources: list[Any] = [
        items, tuple(items), data.epoch, lambda start: items[start:] or items, data.few,
        DataLoader(items, batch_size=None),
    ]  # fmt: skip
    found = []
    for source in sources:
        calls = observers.Calls()
        dr.train(path, source, steps=5, callbacks=[calls])
        found.append([result.loss for result in calls.results])
    assert all(losses == found[0] for losses in found)
    # An iterator has one epoch; a list is read again.
    nothing: list[Any] = [[], iter(()), lambda: [], lambda start: iter(()), DataLoader(items[:0], batch_size=None)]
    for empty in nothing:
        with pytest.raises(RunError, match="the data: expected batches, found none"):
            dr.train(path, empty, steps=7)
    assert dr.train(path, iter(items), steps=7).reason == "the data has ended"
    assert dr.train(path, items, steps=7).reason == ""
    ended = dr.train(path, data.samples(), steps=4, seed=3)
    assert (
        ended.loss == dr.train(path, data.samples, steps=4, seed=3).loss != dr.train(path, data.samples, steps=4).loss
    )


class Columns:
    """The protocol of `datasets.Dataset`: samples are dicts of numbers and lists, batches dicts of nested lists."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data.Table()[index]
        row = {"x": x.tolist(), "targets": y.tolist(), "text": f"sample {index}"}
        return {name: row[name] for name in self.columns}

    def batches(self) -> list[dict[str, Any]]:
        rows = [self[index] for index in range(3 * ROWS)]
        parts = (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
        return [{name: [row[name] for row in part] for name in self.columns} for part in parts]


def test_a_data_set_of_columns_of_lists(tmp_path: Path) -> None:
    path = perceptron.saved("3/1/1/1", tmp_path)
    own = Columns("targets", "x")
    assert dr.train(path, own, steps=7, seed=3).loss == dr.train(path, data.samples, steps=7, seed=3).loss
    x, y = (torch.stack(rows) for rows in zip(*(data.Table()[index] for index in range(ROWS)), strict=True))
    assert dr.train(path, own.batches(), steps=1).loss == dr.train(path, [(x, y)], steps=1).loss
    with pytest.raises(RunError, match="expected data for 'x', 'targets', found") as caught:
        dr.train(path, Columns("x", "targets", "text"), steps=1)
    assert (
        caught.value.hint == "leave out 'text'; of a data set of Hugging Face: dataset.select_columns(['x', 'targets'])"
    )
    batch = own.batches()[0]
    for wrong in ([*batch["x"][:-1], [1.0]], ["a"] * ROWS):
        with pytest.raises(RunError, match="input 'x': expected numbers, or lists of them of equal lengths, found"):
            dr.train(path, [{**batch, "x": wrong}], steps=1)


def test_a_loader_trains_on_the_command_line(tmp_path: Path) -> None:
    manifest = perceptron.saved_manifest("3/1/1/1", tmp_path)
    here = open_data(data.loader(), manifest, 5)
    there = load_data(f"{data.__file__}:loader")(manifest, 5, DataPosition())
    for step in range(2, 9):
        mine, theirs = here.batch(step), there.batch(step)
        assert mine is not None
        assert theirs is not None
        for rank in range(3):
            for value, other in zip(mine.local(rank, "cpu"), theirs.local(rank, "cpu"), strict=True):
                assert torch.equal(value, other)


def test_the_backend_with_checks_runs_a_step_and_its_evaluation() -> None:
    step = perceptron.step("2/1/1/1", evaluates=True)
    options: dict[str, Any] = {"evaluation": data.held_out, "evaluate_every": 2}
    with pytest.raises(RunError, match="the input 'x' has a NaN before the step"):
        dr.train(step, data.with_nan, steps=9, backend="checked", **options)
    assert step.steps == 4


def test_ranks_without_a_part_of_a_state_write_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(6, 5), torch.randn(6, 2)) for _ in range(2)]
    step = dr.compile_training(
        torch.nn.Linear(5, 2),
        mse_loss,
        optimizer=dr.optim.AdamW(0.1),
        example_batch=batches[0],
        strategy="3/1/1/1,zero=1",
    )
    begin = {name: value.clone() for name, value in step.parameters().items()}
    dr.train(step, batches, steps=1, checkpoint=tmp_path)
    dr.train(step, batches, steps=2, checkpoint=tmp_path, resume="last")
    expected = {name: value.clone() for name, value in step.parameters().items()}
    step.load_parameters(begin)
    with pytest.warns(UserWarning, match="no step is left: 2 of 2 are done"):
        dr.train(step, batches, steps=2, checkpoint=tmp_path, resume="last")
    assert all(torch.equal(expected[name], value) for name, value in step.parameters().items())


def test_unusable_data_are_refused(tmp_path: Path) -> None:
    manifest: Manifest = perceptron.saved_manifest("3/1/1/1", tmp_path)
    with pytest.raises(RunError, match="expected batches of 11 samples, found 3 in the last one of an epoch") as caught:
        open_data(DataLoader(Table(), batch_size=ROWS), manifest, 0)
    assert "drop_last=True" in caught.value.hint
    with pytest.raises(RunError, match="expected batches or a data set, found int"):
        open_data(17, manifest, 0).batch(0)
    step = perceptron.step("1/1/1/1")
    with pytest.raises(RunError, match="a TrainingStep runs on the CPU, found 'cuda'"):
        dr.train(step, data.batches, steps=2, device="cuda")
    dr.train(step, data.batches, steps=1, checkpoint=tmp_path / "ck")
    with pytest.raises(CheckpointError, match="there are checkpoints here already"):
        dr.train(step, data.batches, steps=2, checkpoint=tmp_path / "ck")


def test_the_ranks_that_are_started_get_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = perceptron.saved("2/1/1/1", tmp_path)
    started: list[list[str]] = []
    monkeypatch.setattr(launch, "launch", lambda n, arguments, graceful: started.append(arguments) or 0)
    options = ["--steps", "3", "--log", "a.csv", "--log", "b.jsonl", "--evaluation", f"{data.__file__}:held_out"]
    for more in ([], ["--averaged"]):
        command = ["train", str(path), "-n", "2", "--data", f"{data.__file__}:batches", *options, *more]
        assert CliRunner().invoke(app, command).exit_code == 0
    without, averaged = started
    assert [a for a, b in itertools.pairwise(without) if b in ("a.csv", "b.jsonl")] == ["--log", "--log"]
    assert "--averaged" not in without
    assert not {"False", "True", "None"} & {*without, *averaged}
    assert sorted(averaged) == sorted([*without, "--averaged"])
