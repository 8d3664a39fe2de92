"""Lightning modules: steps, rates, clipping and metrics are those of Lightning's own loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distir_relax as dr
from distir_relax.errors import DistIRError

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(pl.LightningModule):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3)).double()
        self.net[1].p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        output = self(x)
        self.log("val_loss", F.cross_entropy(output, y))
        self.log_dict({"val_acc": (output.argmax(1) == y).double().mean()}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": self.net[0].parameters(), "lr": 0.03}, {"params": self.net[3].parameters()}]
        )
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(36, 7, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(3, (36,), generator=generator)), batch_size=9)


class Losses(dr.Callback):
    """Losses and metrics of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def done(self, result: Any) -> None:
        self.losses.append(result.loss)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = dict(metrics)


class TheirLosses(pl.Callback):
    """Those of Lightning."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name})


def test_a_run_is_that_of_lightning(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Classifier()
    theirs = TheirLosses()
    stop = pl.callbacks.EarlyStopping("val_acc", mode="max", patience=99)
    saved = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=5)
    chosen: dict[str, Any] = {"max_epochs": 3, "gradient_clip_val": 0.3, "num_sanity_val_steps": 0, **QUIET}
    trainer = pl.Trainer(callbacks=[stop, saved], **chosen)
    data = loader()
    training = dr.Training(
        copy.deepcopy(module), example_batch=next(iter(data)), arguments=trainer, steps_per_epoch=len(data)
    )
    options = training.run_options()
    (early,) = options.pop("callbacks")
    assert isinstance(early, dr.callbacks.EarlyStopping)
    assert options == {
        "steps": 12, "checkpoint": str(tmp_path), "every": 5, "keep": 1, "best": "val_loss:min", "evaluate_every": 4
    }  # fmt: skip
    step, ours = training.compile(strategy="3/1/1/1"), Losses()
    dr.train(step, data, steps=12, evaluation=data, evaluate_every=4, callbacks=[ours])
    pl.Trainer(callbacks=[theirs], enable_checkpointing=False, **chosen).fit(module, data, data)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert [pytest.approx(metrics, rel=1e-9) for metrics in ours.metrics.values()] == theirs.metrics
    assert set(ours.metrics) == {4, 8, 12}
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=1e-9, atol=1e-12)


class Frequent(Classifier):
    """Steps its scheduler after some batches, or epochs."""

    def __init__(self, interval: str, frequency: int) -> None:
        super().__init__()
        self.interval, self.frequency = interval, frequency

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        config = {"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class TheirRates(pl.Callback):
    """The rate of each step of Lightning's optimizer."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("interval", "frequency", "accumulated"), [("step", 3, 1), ("step", 2, 2), ("step", 4, 2), ("epoch", 2, 1)]
)
def test_a_frequency_counts_batches_of_an_epoch(interval: str, frequency: int, accumulated: int) -> None:
    module, theirs, data = Frequent(interval, frequency), TheirRates(), loader()
    chosen: dict[str, Any] = {
        "max_epochs": 4, "accumulate_grad_batches": accumulated, "num_sanity_val_steps": 0,
        "enable_checkpointing": False, "limit_val_batches": 0, **QUIET,
    }  # fmt: skip
    trainer = pl.Trainer(**chosen)
    epoch = len(data) // accumulated
    batch = next(iter(DataLoader(data.dataset, batch_size=9 * accumulated)))
    training = dr.Training(copy.deepcopy(module), example_batch=batch, arguments=trainer, steps_per_epoch=epoch)
    rate = training.resolved.optimizer.lr
    assert callable(rate)
    pl.Trainer(callbacks=[theirs], **chosen).fit(module, data)
    assert len(theirs.rates) == 4 * epoch
    assert [rate(step) for step in range(4 * epoch)] == pytest.approx(theirs.rates)
    if interval == "step":
        with pytest.raises(DistIRError, match="the number of steps of an epoch"):
            dr.Training(module, example_batch=batch, arguments=pl.Trainer(max_steps=8, **QUIET)).resolved  # noqa: B018


@pytest.mark.parametrize("limits", [{"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"overfit_batches": 2}])
def test_limits_of_batches(limits: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module, theirs, ours, data = Classifier(), TheirLosses(), Losses(), loader()
    chosen: dict[str, Any] = {
        "max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False, "limit_val_batches": 1, **QUIET,
        **limits,
    }  # fmt: skip
    training = dr.Training(
        copy.deepcopy(module), example_batch=next(iter(data)), arguments=pl.Trainer(**chosen),
        steps_per_epoch=len(data),
    )  # fmt: skip
    dr.train(training.compile(), data, evaluation=data, callbacks=[ours], **training.run_options())
    pl.Trainer(callbacks=[theirs], **chosen).fit(module, data, data)
    assert len(ours.losses) == (9 if limits.get("limit_train_batches") == 3 else 6)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert [pytest.approx(metrics, rel=1e-9) for metrics in ours.metrics.values()] == theirs.metrics


def test_overfitting_reads_in_order() -> None:
    """As Lightning does with a loader that shuffles."""
    data = loader()
    shuffled = DataLoader(data.dataset, batch_size=9, shuffle=True)
    trainer = pl.Trainer(max_steps=4, overfit_batches=2, enable_checkpointing=False, **QUIET)
    training = dr.Training(Classifier(), example_batch=next(iter(data)), optimizer=dr.optim.SGD(0.0), arguments=trainer)
    ours, expected = Losses(), Losses()
    step = training.compile()
    options = training.run_options()
    assert options == {"steps": 4, "limit_batches": 2, "limit_evaluation_batches": 2, "in_order": True}
    dr.train(step, shuffled, callbacks=[ours], **options)
    dr.train(training.compile(), list(data)[:2], steps=4, callbacks=[expected])
    assert ours.losses == expected.losses


class Manual(Classifier):
    """Calls its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Classifier):
    """Has two optimizers."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[number].parameters(), 0.1) for number in (0, 3)]


class TwoSchedulers(Classifier):
    """Has one optimizer and two schedulers."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (1, 2)]


class Clipping(Classifier):
    """Clips gradients its own way."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


def _clamp(self: Any, *args: Any, **kwargs: Any) -> None:
    """A hook that changes weights."""
    self.net[0].weight.data.clamp_(-0.1, 0.1)


HOOKS = (
    "on_train_batch_start", "on_before_optimizer_step", "on_after_batch_transfer", "optimizer_zero_grad",
    "lr_scheduler_step", "optimizer_step", "on_train_epoch_end", "configure_callbacks", "on_save_checkpoint",
    "transfer_batch_to_device",
)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_that_is_not_called_is_refused(hook: str) -> None:
    module = type("Hooked", (Classifier,), {hook: _clamp, "test_step": _clamp, "prepare_data": _clamp})()
    with pytest.raises(DistIRError, match=f"Hooked: the module has its own {hook}, which a compiled step does not"):
        dr.compile_training(module, optimizer=dr.optim.SGD(lr=0.1), example_batch=next(iter(loader())))


class Clamped(Classifier):
    """Clamps a weight after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        _clamp(self)


@pytest.mark.parametrize("runs", [True, False])
def test_weights_are_changed_at_the_end_of_a_batch(runs: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    theirs, data = Clamped(), loader()
    ours = copy.deepcopy(theirs)
    chosen: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": False, "num_sanity_val_steps": 0, **QUIET}
    step = dr.compile_training(
        ours, example_batch=next(iter(data)), arguments=pl.Trainer(**chosen), steps_per_epoch=4, strategy="3/1/1/1"
    )
    if runs:
        dr.train(step, data, steps=8)
    else:
        losses = [step(batch) for _ in range(2) for batch in data]
        assert losses == ours.losses
    pl.Trainer(**chosen).fit(theirs, data)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(step.parameters()[name], parameter.detach(), rtol=1e-9, atol=1e-12)
    with pytest.raises(DistIRError, match="a step without hooks, which a bundle has not"):
        step.save(tmp_path / "m.dist")


class Counting(pl.Callback):
    """A callback of a user's."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"callbacks": pl.callbacks.StochasticWeightAveraging(1e-2)},
            "callback StochasticWeightAveraging is not",
        ),
        ({"callbacks": pl.callbacks.GradientAccumulationScheduler({1: 2})}, "callback GradientAccumulationScheduler"),
        ({"callbacks": Counting()}, "the callback Counting is not called"),
        ({"min_steps": 3}, "no equal of min_steps=3"),
        ({"reload_dataloaders_every_n_epochs": 1}, "no equal of reload_dataloaders_every_n_epochs=1"),
        ({"val_check_interval": "00:00:01:00"}, "no equal of val_check_interval=60"),
        ({"callbacks": pl.callbacks.Timer("00:00:01:00", interval="epoch")}, "Timer: .* no equal of interval='epoch'"),
        (
            {
                "callbacks": pl.callbacks.EarlyStopping("val_loss", check_on_train_epoch_end=True),
                "val_check_interval": 0.5,
            },
            "EarlyStopping: there is no equal of check_on_train_epoch_end=True",
        ),
        (
            {"callbacks": pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=3), "enable_checkpointing": True},
            "ModelCheckpoint: there is no equal of save_top_k=3",
        ),
        (
            {"callbacks": [pl.callbacks.ModelCheckpoint(every_n_epochs=n) for n in (1, 2)]},
            "expected one ModelCheckpoint, found several",
        ),
        ({"limit_train_batches": 3, "accumulate_grad_batches": 2}, "in steps of 2 accumulated ones, found 3"),
    ],
)
def test_trainer_option_without_equal_is_refused(options: dict[str, Any], message: str) -> None:
    saves = any(isinstance(c, list) or type(c) is pl.callbacks.ModelCheckpoint for c in options.values())
    trainer = pl.Trainer(max_steps=4, **{**QUIET, "enable_checkpointing": saves, **options})
    training = dr.Training(
        Classifier(), example_batch=next(iter(loader())), optimizer=dr.optim.SGD(0.1), arguments=trainer
    )
    with pytest.raises(DistIRError, match=message):
        training.compile()


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("chosen", "steps"),
    [
        ([{"stopping_threshold": 10.0}], 4),
        ([{"divergence_threshold": 0.0}], 4),
        ([{"monitor": "val_nan"}], 4),
        ([{"monitor": "val_nan", "check_finite": False, "patience": 3}], 12),
        ([{"monitor": "val_flat", "patience": 2}, {"patience": 99}], 12),
        ([{"patience": 99}, {"monitor": "val_flat", "patience": 2}], 12),
        ([{"stopping_threshold": 0.0, "divergence_threshold": 99.0, "patience": 99}], 16),
    ],
)
def test_early_stopping_ends_where_that_of_lightning_does(chosen: list[dict[str, Any]], steps: int) -> None:
    class Watched(Classifier):
        def validation_step(self, batch: Any) -> None:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log_dict({"val_loss": loss, "val_flat": loss * 0, "val_nan": loss * float("nan")})

    def trainer() -> pl.Trainer:
        stops = [pl.callbacks.EarlyStopping(**{"monitor": "val_loss", **options}) for options in chosen]
        return pl.Trainer(max_epochs=4, callbacks=stops, enable_checkpointing=False, num_sanity_val_steps=0, **QUIET)

    data, theirs = loader(), trainer()
    training = dr.Training(
        Watched(), example_batch=next(iter(data)), optimizer=dr.optim.SGD(0.01), arguments=trainer(), steps_per_epoch=4
    )
    ended = dr.train(training.compile(), data, evaluation=data, **training.run_options())
    theirs.fit(Watched(), data, data)
    assert ended.step == theirs.global_step == steps


def test_checkpoints_that_lightning_does_not_write(tmp_path: Path) -> None:
    saved = pl.callbacks.ModelCheckpoint
    for callback, kept in (
        (saved(tmp_path, save_top_k=0), None), (saved(tmp_path, every_n_epochs=0, every_n_train_steps=0), None),
        (saved(tmp_path, save_top_k=0, save_last=True), 1), (saved(tmp_path, save_top_k=-1), 1_000_000),
    ):  # fmt: skip
        training = dr.Training(
            Classifier(), example_batch=next(iter(loader())), optimizer=dr.optim.SGD(0.1),
            arguments=pl.Trainer(max_steps=4, callbacks=callback, **QUIET),
        )  # fmt: skip
        assert training.run_options().get("keep") == kept


def _reads_number(self: Any, batch: Any, batch_idx: int) -> Any:
    return F.cross_entropy(self(batch[0]), batch[1]) * (1.0 if batch_idx % 2 else 0.1)


def _reads_epoch(self: Any, batch: Any) -> Any:
    return F.cross_entropy(self(batch[0]), batch[1]) * (1.0 if self.current_epoch == 1 else 0.1)


def _reads_step(self: Any, batch: Any) -> Any:
    return F.cross_entropy(self(batch[0]), batch[1]) * min(1.0, self.global_step / 10)


def _reads_trainer(self: Any, batch: Any) -> Any:
    return F.cross_entropy(self(batch[0]), batch[1]) * (1.0 + self.trainer.max_epochs)


def _reads_rank(self: Any, batch: Any, batch_idx: int) -> Any:
    assert self.global_rank == 0
    self.print("a step")
    return self._shared(batch, batch_idx)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (_reads_number, "training_step: the step reads batch_idx"), (_reads_epoch, "the step reads current_epoch"),
        (_reads_step, "the step reads global_step"), (_reads_trainer, "the step reads max_epochs"), (_reads_rank, ""),
    ],
)  # fmt: skip
def test_step_that_reads_a_count_of_the_run_is_refused(step: Any, name: str) -> None:
    """Its value would be that of the export in each step. It may be passed on."""
    shared = lambda self, batch, number: F.cross_entropy(self(batch[0]), batch[1])  # noqa: E731
    module = type("Counts", (Classifier,), {"training_step": step, "_shared": shared})()
    arguments: dict[str, Any] = {"optimizer": dr.optim.SGD(lr=0.1), "example_batch": next(iter(loader()))}
    if not name:
        dr.compile_training(module, **arguments)
        return
    with pytest.raises(DistIRError, match=name):
        dr.compile_training(module, **arguments)
    assert module.current_epoch == 0


class Mean:
    """A metric with a state, as torchmetrics has them."""

    def compute(self) -> float:
        return 0.0


def test_logged_values() -> None:
    data = loader()

    def results(**logged: Any) -> dict[str, float]:
        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            for name, (value, options) in logged.items():
                self.log(name, loss.reshape(value) if isinstance(value, tuple) else value, **options)

        torch.manual_seed(1)
        module = type("Logs", (Classifier,), {"validation_step": validation_step})()
        step = dr.compile_training(module, optimizer=dr.optim.SGD(lr=0.1), example_batch=next(iter(data)))
        return step.evaluate(data)

    found = results(number=(2.5, {}), one=((1, 1), {"reduce_fx": torch.mean, "prog_bar": True}))
    assert found["number"] == 2.5
    assert found["one"] == pytest.approx(found["loss"])
    for value, options, message in (
        ((), {"reduce_fx": "max"}, "Logs.log\\('x'\\): expected reduce_fx='mean', found 'max'"),
        ((), {"on_epoch": False}, "found on_epoch=False"),
        (Mean(), {}, "found the metric Mean"),
        (torch.ones(2), {}, "a tensor of one element"),
    ):
        with pytest.raises(DistIRError, match=message):
            results(x=(value, options))


def test_loggers_and_time_limits_are_honoured(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "enable_checkpointing": False, "accelerator": "cpu"}
    training = dr.Training(
        Classifier(), example_batch=next(iter(loader())), optimizer=dr.optim.SGD(0.1),
        arguments=pl.Trainer(callbacks=pl.callbacks.Timer({"milliseconds": 2500}), logger=False, **options),
    )  # fmt: skip
    assert [limit.seconds for limit in training.run_options()["callbacks"]] == [2.5]
    trainer = pl.Trainer(max_time={"hours": 1}, logger=pl.loggers.TensorBoardLogger(tmp_path), **options)
    training = dr.Training(
        Classifier(), example_batch=next(iter(loader())), optimizer=dr.optim.SGD(0.1), arguments=trainer
    )
    trainer = pl.Trainer(logger=pl.loggers.CSVLogger(tmp_path), **options)
    (table,) = dr.Training(
        Classifier(), example_batch=next(iter(loader())), optimizer=dr.optim.SGD(0.1), arguments=trainer
    ).run_options()["callbacks"]
    assert table.path == tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    log, limit = training.run_options()["callbacks"]
    assert isinstance(log, dr.callbacks.TensorBoardLogger)
    assert isinstance(limit, dr.callbacks.TimeLimit)
    assert limit.seconds == 3600
    ended = dr.train(training.compile(), loader(), steps=400, callbacks=[dr.callbacks.TimeLimit(1e-9)])
    assert (ended.step, ended.reason) == (1, "the limit of 1e-09 seconds is reached")


def test_mistakes_are_errors() -> None:
    batch = next(iter(loader()))
    for kind, message in (
        (Manual, "automatic optimization"), (Two, "one optimizer, found 2"), (Clipping, "its own configure"),
        (TwoSchedulers, "one scheduler, found 2"),
    ):  # fmt: skip
        with pytest.raises(DistIRError, match=message):
            dr.compile_training(kind(), example_batch=batch)
    for kind, message in ((Manual, "automatic optimization"), (Clipping, "its own configure")):
        with pytest.raises(DistIRError, match=message):
            dr.compile_training(kind(), optimizer=dr.optim.SGD(lr=0.1), example_batch=batch)
    with pytest.raises(DistIRError, match="label_smoothing: expected no loss with label_smoothing"):
        dr.compile_training(Classifier(), optimizer=dr.optim.SGD(lr=0.1), example_batch=batch, label_smoothing=0.1)
    with pytest.raises(DistIRError, match="label_smoothing: expected a factor from 0 to below 1, found 1"):
        dr.compile_training(Classifier(), optimizer=dr.optim.SGD(lr=0.1), example_batch=batch, label_smoothing=1)
    with pytest.raises(DistIRError, match="no loss and no metrics"):
        dr.compile_training(Classifier(), F.cross_entropy, optimizer=dr.optim.SGD(lr=0.1), example_batch=batch)
    with pytest.raises(DistIRError, match="the number of steps of an epoch"):
        dr.compile_training(Classifier(), example_batch=batch)
    with pytest.raises(DistIRError, match="no loss and no metrics"):
        dr.compile_training(Classifier(), F.cross_entropy, example_batch=batch)
    trainer = pl.Trainer(max_epochs=3, enable_checkpointing=False, **QUIET)
    with pytest.raises(DistIRError, match="found epochs"):
        dr.compile_training(Classifier(), example_batch=batch, arguments=trainer)
    trainer = pl.Trainer(max_steps=3, precision="64-true", enable_checkpointing=False, **QUIET)
    with pytest.raises(DistIRError, match="found '64-true'"):
        dr.compile_training(Classifier(), example_batch=batch, arguments=trainer)
