"""Resumed runs of programs that train other parameters, or begin with other frozen weights, than the checkpoint's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import distir_relax as dr
from distir_relax.checkpoints import latest
from distir_relax.errors import CheckpointError
from tests.runtime.processes import mpirun
from tests.training import data
from tests.training.data import drawn


class Staged(nn.Module):
    """Two products around a batch norm whose statistics can be frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


def freeze(model: Staged, frozen: bool) -> Staged:
    """Freeze the first layer and the statistics of the norm, or train all."""
    model.up.requires_grad_(not frozen)
    model.norm.train(not frozen)
    return model


def compiled(frozen: bool, strategy: str, seed: int = 0, **options: Any) -> dr.TrainingStep:
    options = {"optimizer": dr.optim.AdamW(0.02)} | options
    return dr.compile_training(
        freeze(Staged(seed), frozen), mse_loss, example_batch=drawn(0), strategy=strategy, name="staged", **options
    )


def by_torch(model: Staged, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        x, target = drawn(number)
        optimizer.zero_grad()
        mse_loss(model(x), target).backward()
        optimizer.step()


def check(step: dr.TrainingStep, model: Staged) -> None:
    found = freeze(Staged(5), frozen=False)
    step.copy_to_model(found)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value, rtol=2e-4, atol=1e-5)


def test_staged_training_resumes_both_ways(tmp_path: Path) -> None:
    """All, then the head alone, twice, then all again: the parameters of torch, of which no stage loses any."""
    options: dict[str, Any] = {"checkpoint": tmp_path, "keep": 1, "resume": "auto"}
    expected = freeze(Staged(), frozen=False)
    steps = torch.optim.AdamW(expected.parameters(), 0.02)
    dr.train(compiled(False, "1/2/1/1"), data.batches, steps=3, **options)
    by_torch(expected, steps, 0, 3)
    freeze(expected, frozen=True)
    steps.zero_grad()
    for last, strategy in ((5, "2/1/1/1"), (7, "1/3/1/1")):
        step = compiled(True, strategy, metrics={})
        if last == 5:
            with pytest.warns(UserWarning, match=r"after step 3: the optimizer's state of up\.weight, now frozen"):
                dr.train(step, data.batches, steps=last, evaluation=data.held_out, **options)
        else:
            dr.train(step, data.batches, steps=last, evaluation=data.held_out, **options)
        by_torch(expected, steps, last - 2, last)
        check(step, expected)
        with torch.no_grad():
            losses = [float(mse_loss(copy.deepcopy(expected).eval()(x), target)) for x, target in data.held_out()]
        assert step.evaluate(data.held_out())["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)
    assert latest(tmp_path).position.held == (
        *("norm.num_batches_tracked", "up.weight", "norm.running_mean", "norm.running_var"),
    )
    step = compiled(False, "3/1/1/1")
    with pytest.warns(UserWarning, match=r"after step 7: the optimizer's state begins anew, as up\.weight had"):
        dr.train(step, data.batches, steps=9, **options)
    freeze(expected, frozen=False)
    by_torch(expected, torch.optim.AdamW(expected.parameters(), 0.02), 7, 9)
    check(step, expected)


OPTIMIZERS: dict[str, Any] = {
    "SGD": (dr.optim.SGD(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "AdamW": (dr.optim.AdamW(0.05, own_steps=True), lambda p: torch.optim.AdamW(p, 0.05)),
    "NAdam": (dr.optim.NAdam(0.05, own_steps=True), lambda p: torch.optim.NAdam(p, 0.05)),
    "RAdam": (dr.optim.RAdam(0.05, own_steps=True), lambda p: torch.optim.RAdam(p, 0.05)),
    "Adafactor": (dr.optim.Adafactor(0.05, own_steps=True), lambda p: torch.optim.Adafactor(p, 0.05)),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_other_parameters_continues_beside_new_state(name: str, tmp_path: Path) -> None:
    ours, theirs = OPTIMIZERS[name]
    expected = freeze(Staged(), frozen=True)
    steps = theirs(expected.parameters())
    dr.train(compiled(True, "2/1/1/1", optimizer=ours), data.batches, steps=3, checkpoint=tmp_path)
    by_torch(expected, steps, 0, 3)
    step = compiled(False, "1/2/1/1", optimizer=ours)
    # In evaluation mode the statistics of the norm were those that it began with.
    with pytest.warns(UserWarning, match=r"the optimizer's state of up\.weight begins anew"):
        dr.train(step, data.batches, steps=6, checkpoint=tmp_path, resume="last")
    by_torch(freeze(expected, frozen=False), steps, 3, 6)
    check(step, expected)


class Adapter(nn.Module):
    """A low-rank adapter of a layer, with the names of peft."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Wrapped(nn.Module):
    """The model within two others, as peft wraps it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model.model(x)


def adapted(wraps: bool, model: Staged) -> nn.Module:
    """Adapters on the first layer; all else is frozen."""
    freeze(model, frozen=True).requires_grad_(False)
    torch.manual_seed(3)
    model.up = Adapter(model.up)  # type: ignore[assignment]
    return Wrapped(model) if wraps else model


@pytest.mark.drawn(1)
@pytest.mark.parametrize("wraps", [False, True])
def test_adapters_are_trained_after_all_parameters(wraps: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path, "keep": 1, "resume": "auto"}
    full = compiled(False, "1/2/1/1")
    dr.train(full, data.batches, steps=3, **options)
    base = Staged(4)
    full.copy_to_model(base)
    expected = adapted(wraps, base)
    for last, strategy in ((5, "2/1/1/1"), (7, "1/2/1/1")):
        step = dr.compile_training(
            adapted(wraps, Staged()),
            mse_loss,
            optimizer=dr.optim.AdamW(0.02),
            example_batch=drawn(0),
            strategy=strategy,
        )
        if last == 5:
            with pytest.warns(UserWarning, match=r"does not have .*lora_A\.weight, .*; .* begins anew, .*, is dropped"):
                dr.train(step, data.batches, steps=last, **options)
            trained = [parameter for parameter in expected.parameters() if parameter.requires_grad]
            steps = torch.optim.AdamW(trained, 0.02)
        else:
            dr.train(step, data.batches, steps=last, **options)
        by_torch(expected, steps, last - 2, last)  # type: ignore[arg-type]
        found = adapted(wraps, Staged(5))
        step.copy_to_model(found)
        for name, value in expected.named_parameters():
            torch.testing.assert_close(found.get_parameter(name), value, rtol=2e-4, atol=1e-5)
    # Adapters have no place in the model without them.
    with pytest.raises(CheckpointError, match=r"has .*lora_A\.weight, .*, which the program does not have"):
        dr.train(compiled(False, "1/1/1/1"), data.batches, steps=9, **options)


def test_other_frozen_weights_are_refused_by_name(tmp_path: Path) -> None:
    dr.train(compiled(True, "2/1/1/1"), data.batches, steps=2, checkpoint=tmp_path)
    for frozen in (True, False):
        with pytest.raises(CheckpointError, match=r"expected the frozen weight 'up\.weight' of the run that wrote"):
            dr.train(compiled(frozen, "1/2/1/1", seed=1), data.batches, steps=3, checkpoint=tmp_path, resume="last")
    model = freeze(Staged(), frozen=True)
    model.norm.running_var[3] += 1
    step = dr.compile_training(model, mse_loss, optimizer=dr.optim.AdamW(0.02), example_batch=drawn(0))
    with pytest.raises(CheckpointError, match=r"the frozen weight 'norm\.running_var'"):
        dr.train(step, data.batches, steps=3, checkpoint=tmp_path, resume="auto")
    dr.train(compiled(True, "1/3/1/1"), data.batches, steps=3, checkpoint=tmp_path, resume="last")


class Scaled(nn.Module):
    """A product with a table, which a program holds as a weight or folds into another one."""

    def __init__(self, first: float, kind: str, folds: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.folds = nn.Linear(5, 3), folds
        table = torch.tensor([first, 1.0, 2.0])
        if kind == "attribute":
            self.up.table = table
        else:
            self.up.register_buffer("table", table, persistent=kind == "persistent")
        self.last_seen = torch.full((3,), first)  # not read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.up.table.exp().cumsum(0) if self.folds else self.up.table
        return self.up(x) * table


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", ["attribute", "persistent", "transient"])
@pytest.mark.parametrize("folds", [False, True])
def test_other_constants_of_the_model_are_refused_by_name(kind: str, folds: bool, tmp_path: Path) -> None:
    """Whether a program has them as weights or not, and on other ranks with another batch size."""

    def step(first: float, folds: bool, strategy: str = "2/1/1/1", rows: int = data.ROWS) -> dr.TrainingStep:
        x, target = drawn(0)
        return dr.compile_training(
            Scaled(first, kind, folds), mse_loss, optimizer=dr.optim.SGD(0.01), strategy=strategy, name="scaled",
            example_batch=(x[:rows], target[:rows]),
        )  # fmt: skip

    samples = torch.utils.data.TensorDataset(*drawn(0))
    dr.train(step(1.0, folds), samples, steps=2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"the frozen weight 'up\.table' of the run .*, found other numbers"):
        dr.train(step(2.0, folds), samples, steps=4, checkpoint=tmp_path, resume="last")
    model = step(1.0, folds, "1/3/1/1", rows=5)
    dr.train(model, samples, steps=3, checkpoint=tmp_path, resume="last")
    if kind != "persistent":
        # A program that folds a table in another place has it, too.
        dr.train(step(1.0, not folds), samples, steps=4, checkpoint=tmp_path, resume="last")


@pytest.mark.parametrize(
    ("optimizer", "others"),
    [
        ({"optimizer": dr.optim.SGD(0.1)}, r"has optimizer\.step, up\.weight\.exp_avg, up\.weight\.exp_avg_sq, .* and"),
        ({"optimizer": dr.optim.Adam(0.1, amsgrad=True)}, r"lacks up\.weight\.max_exp_avg_sq"),
        ({"averaging": dr.optim.EMA(0.9)}, r"lacks up\.weight\.averaged"),
    ],
)
def test_state_of_another_optimizer_is_refused(optimizer: dict[str, Any], others: str, tmp_path: Path) -> None:
    dr.train(compiled(False, "1/1/1/1"), data.batches, steps=1, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=others):
        dr.train(compiled(False, "1/1/1/1", **optimizer), data.batches, steps=2, checkpoint=tmp_path, resume="last")


@pytest.mark.mpirun
def test_an_optimizer_of_another_kind_is_refused_where_state_continues(tmp_path: Path) -> None:
    """Adam, AdamW and RAdam have state of the same names."""
    dr.train(compiled(False, "1/1/1/1"), data.batches, steps=1, checkpoint=tmp_path)
    for optimizer in (dr.optim.RAdam(0.1), dr.optim.Groups(dr.optim.AdamW(0.1), {"*.bias": dr.optim.Adam(0.1)})):
        step = compiled(False, "1/1/1/1", optimizer=optimizer)
        with pytest.raises(CheckpointError, match=r"the optimizer AdamW of the run .*, found (RAdam|Adam, AdamW)"):
            dr.train(step, data.batches, steps=2, checkpoint=tmp_path, resume="last")
    # New parameters alone are trained, and no state continues.
    model = Staged().requires_grad_(False)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model.forward = lambda x: model.down(torch.tanh(model.norm(model.up(x)))) * model.scale  # type: ignore[method-assign]
    step = dr.compile_training(model, mse_loss, optimizer=dr.optim.RAdam(0.1), example_batch=drawn(0))
    with pytest.warns(UserWarning, match="does not have scale: .*; optimizer is now RAdam, was AdamW"):
        dr.train(step, data.batches, steps=2, checkpoint=tmp_path, resume="last")


def test_other_schedules_and_clipping_are_named(tmp_path: Path) -> None:
    def run(steps: int, lr: Any, **options: Any) -> list[str]:
        step = compiled(False, "1/1/1/1", optimizer=dr.optim.SGD(lr), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            dr.train(step, data.batches, steps=steps, checkpoint=tmp_path, resume="auto")
        return [str(item.message) for item in caught if "resumed after" in str(item.message)]

    assert run(1, dr.lr.MultiStep(0.1, (3,))) == run(2, dr.lr.MultiStep(0.1, (3,))) == []
    (line,) = run(3, dr.lr.Linear(0.05, 20), clip_norm=0.5)
    assert line == (
        "resumed after step 2: learning_rate is now Linear(lr=0.05, steps=20, warmup=0, least=0), "
        "was MultiStep(lr=0.1, factor=0.1); clip_norm is now 0.5, was None"
    )
    assert run(4, dr.lr.Linear(0.05, 20), clip_norm=0.5) == []
    (line,) = run(5, dr.lr.Linear(0.05, 30), clip_norm=0.5)
    assert "clip_norm" not in line


def test_ranks_of_a_launch_load_the_trained_values_of_frozen_weights(tmp_path: Path) -> None:
    folder, bundle = tmp_path / "ck", tmp_path / "frozen.dist"
    dr.train(compiled(False, "2/1/1/1"), data.batches, steps=2, checkpoint=folder)
    step = compiled(True, "1/2/1/1")
    step.save(bundle, ("torch",))
    done = mpirun(2, "-m", "distir_relax", "train", bundle, "--data", f"{data.__file__}:batches", "--steps", 4,
                  "--checkpoint", folder, "--resume")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "up.weight, now frozen" in done.stderr
    dr.train(step, data.batches, steps=4, checkpoint=tmp_path / "here")
    here = step.parameters()
    after = compiled(True, "1/1/1/1")
    dr.train(after, data.batches, steps=5, checkpoint=folder, resume="last")
    assert not torch.equal(after.parameters()["up.weight"], here["up.weight"])
