"""Settings of a run from the `Trainer` of Lightning, whose callbacks are honoured, neutral, or errors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.lightning_module import is_of_lightning
from distir_relax.frontends.torch.trainer_settings import MOST_KEPT, TrainerSettings, count_steps, no_equal

_WHERE = "Trainer"
_NARROW = {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "bf16-true", "32-true": None}
_HONOURED = (
    "precision logger callbacks fast_dev_run max_epochs max_steps max_time limit_train_batches limit_val_batches "
    "overfit_batches val_check_interval check_val_every_n_epoch enable_checkpointing accumulate_grad_batches "
    "gradient_clip_val gradient_clip_algorithm default_root_dir"
)
_NEUTRAL = (
    "accelerator strategy devices num_nodes limit_test_batches limit_predict_batches num_sanity_val_steps "
    "log_every_n_steps enable_progress_bar enable_model_summary deterministic benchmark inference_mode "
    "use_distributed_sampler profiler detect_anomaly barebones plugins sync_batchnorm enable_autolog_hparams "
    "model_registry"
)
"""Arguments that say where a run computes, what it shows, and those of other runs than training."""
_KNOWN = frozenset(f"{_HONOURED} {_NEUTRAL}".split())
"""Arguments of a `Trainer` that need not have their defaults."""
_NEUTRAL_CALLBACKS = (
    "ProgressBar", "TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary", "LearningRateMonitor",
    "DeviceStatsMonitor", "ThroughputMonitor", "OnExceptionCheckpoint",
)  # fmt: skip
_STOPPING = ("patience", "mode", "stopping_threshold", "divergence_threshold", "check_finite")
"""Arguments of `EarlyStopping` that have the same name here."""
_HINTS = {
    "StochasticWeightAveraging": "average with dr.Training(..., averaging=dr.optim.SWA(start)); its rate is a schedule",
    "EMAWeightAveraging": "average with dr.Training(..., averaging=dr.optim.EMA(decay))",
    "WeightAveraging": "average with dr.Training(..., averaging=dr.optim.EMA(decay)) or dr.optim.SWA(start)",
    "GradientAccumulationScheduler": "accumulate_grad_batches=N is the same number in all epochs",
}


def settings_of_lightning(trainer: Any, steps_per_epoch: int | None) -> TrainerSettings:
    """Return the settings of a `Trainer` of Lightning; see `read_arguments` for errors."""
    _check_arguments(trainer)
    if steps_per_epoch is not None:
        steps_per_epoch = _limited(trainer, steps_per_epoch)
    steps = count_steps(trainer.max_steps, trainer.max_epochs or 0, steps_per_epoch, _WHERE)
    run: dict[str, Any] = {"steps": steps, **_epochs(trainer)}
    stopping: list[dict[str, Any]] = []
    seconds, saves = None, False
    for callback in trainer.callbacks:
        kind = type(callback).__name__ if is_of_lightning(type(callback)) else ""
        if kind == "ModelCheckpoint":
            if saves:
                raise ImportModelError(
                    "expected one ModelCheckpoint, found several", _WHERE,
                    "monitor, every_n_train_steps and save_top_k=-1 may be those of a single one; "
                    "pass enable_checkpointing=False for none",
                )  # fmt: skip
            saves = True
            run |= {} if trainer.fast_dev_run else _checkpoints(callback, trainer, steps_per_epoch or steps)
        elif kind == "EarlyStopping":
            stopping.append(_early_stopping(callback, trainer))
        elif kind == "Timer":
            seconds = _duration(callback)
        elif kind not in _NEUTRAL_CALLBACKS:
            raise ImportModelError(
                f"the callback {type(callback).__name__} is not called by a compiled step", _WHERE,
                _HINTS.get(kind, "write a dr.Callback, and pass it to dr.train"),
            )  # fmt: skip
    if (interval := trainer.val_check_interval) is not None and trainer.limit_val_batches:
        counts = isinstance(interval, int) and not isinstance(interval, bool)
        if counts or steps_per_epoch is not None:
            epochs = trainer.check_val_every_n_epoch or 1
            run["evaluate_every"] = interval if counts else max(1, round(interval * epochs * (steps_per_epoch or 1)))
    return TrainerSettings(
        trainer.gradient_clip_val or None, _NARROW[trainer.precision], trainer.accumulate_grad_batches, run=run,
        logs=_logs(trainer), early_stopping=tuple(stopping), max_seconds=seconds, steps_per_epoch=steps_per_epoch,
    )  # fmt: skip


def _check_arguments(trainer: Any) -> None:
    """Raise `ImportModelError` for an argument that changes a run, and has no equal here."""
    if trainer.precision not in _NARROW:
        raise ImportModelError(
            f"expected the precision 32-true, bf16-mixed, bf16-true or 16-mixed, found {trainer.precision!r}", _WHERE
        )
    if trainer.gradient_clip_val and (trainer.gradient_clip_algorithm or "norm") != "norm":
        raise ImportModelError(
            f"expected gradients that are clipped by their norm, found {trainer.gradient_clip_algorithm!r}", _WHERE
        )
    loop = trainer.fit_loop
    values = {
        "min_epochs": loop.min_epochs, "min_steps": loop.epoch_loop.min_steps,
        "val_check_interval": trainer._val_check_time_interval,
    }  # fmt: skip
    for name, parameter in inspect.signature(type(trainer).__init__).parameters.items():
        default = None if name in values else parameter.default
        value = values.get(name, getattr(trainer, name, default))
        if (name in values or name not in _KNOWN) and value != default and name != "self":
            raise no_equal(name, value, _WHERE)


def _limited(trainer: Any, steps_per_epoch: int) -> int:
    """Return the number of steps of an epoch, or of its first batches under `limit_train_batches`."""
    limit = _batches(trainer, trainer.limit_train_batches)
    if limit is None:
        return steps_per_epoch
    return min(steps_per_epoch, limit if isinstance(limit, int) else int(steps_per_epoch * limit))


def _batches(trainer: Any, limit: float) -> int | float | None:
    """Return a limit of batches as one of steps, which take as many as the trainer accumulates; None for all."""
    if isinstance(limit, float):
        return None if _is_all(limit) else limit
    steps, rest = divmod(limit, trainer.accumulate_grad_batches)
    if rest:
        raise ImportModelError(
            f"expected batches in steps of {trainer.accumulate_grad_batches} accumulated ones, found {limit}",
            _WHERE,
        )
    return int(steps)


def _is_all(limit: float) -> bool:
    """Return whether a limit is all batches; the integer 1 is a single one."""
    return isinstance(limit, float) and limit == 1.0


def _epochs(trainer: Any) -> dict[str, Any]:
    """Return the batches of an epoch, and of an evaluation, as keyword arguments of `dr.train`."""
    evaluated = trainer.limit_val_batches
    options = {
        "limit_batches": _batches(trainer, trainer.limit_train_batches),
        "limit_evaluation_batches": evaluated if evaluated and not _is_all(evaluated) else None,
        "in_order": bool(trainer.overfit_batches) or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _early_stopping(callback: Any, trainer: Any) -> dict[str, Any]:
    """Return the arguments of a `dr.callbacks.EarlyStopping` that observes each evaluation."""
    once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    if callback._check_on_train_epoch_end and not once:
        raise no_equal("check_on_train_epoch_end", True, "EarlyStopping", "it is checked after each evaluation")
    options = {name: getattr(callback, name) for name in _STOPPING}
    return {"metric": callback.monitor, "min_delta": abs(float(callback.min_delta)), **options}


def _duration(callback: Any) -> float | None:
    """Return the seconds of a `Timer`, or None for no limit."""
    if callback._interval != "step":
        raise no_equal("interval", "epoch", "Timer", "interval='step' ends the run after a step")
    return None if callback._duration is None else float(callback._duration)


def _checkpoints(callback: Any, trainer: Any, epoch: int) -> dict[str, Any]:
    """Return the keyword arguments of `dr.train` for a `ModelCheckpoint`."""
    if getattr(callback, "_train_time_interval", None) is not None:
        raise no_equal("train_time_interval", callback._train_time_interval, "ModelCheckpoint", "count steps")
    kept = callback.save_top_k
    if kept > 1 and callback.monitor:
        raise no_equal(
            "save_top_k", kept, "ModelCheckpoint", "1 keeps the best and the newest checkpoint, -1 all of them"
        )
    is_off = not (callback._every_n_train_steps or callback._every_n_epochs)
    if is_off or (kept == 0 and not callback.save_last):
        return {}
    run: dict[str, Any] = {
        "checkpoint": str(callback.dirpath or f"{trainer.default_root_dir}/checkpoints"),
        "every": callback._every_n_train_steps or (callback._every_n_epochs or 1) * epoch,
        "keep": MOST_KEPT if kept < 0 else max(1, kept),
    }
    return run | ({"best": f"{callback.monitor}:{callback.mode}"} if callback.monitor and kept else {})


def _logs(trainer: Any) -> tuple[str, ...]:
    """Return the paths of the logs by loggers of Lightning."""
    paths = []
    for logger in () if trainer.fast_dev_run else trainer.loggers:
        kind = type(logger).__name__ if is_of_lightning(type(logger)) else ""
        if kind == "TensorBoardLogger":
            paths.append(f"{logger.log_dir}/")
        elif kind == "CSVLogger":
            paths.append(str(Path(logger.log_dir) / "metrics.csv"))
        else:
            raise ImportModelError(
                f"expected a TensorBoardLogger or a CSVLogger, found {type(logger).__name__}", _WHERE,
                "pass logger=False to the Trainer, and a dr.Callback to dr.train",
            )  # fmt: skip
    return tuple(paths)
