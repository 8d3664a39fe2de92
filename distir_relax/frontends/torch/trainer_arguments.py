"""Arguments of other training loops: transformers' `TrainingArguments`, and the `Trainer` of Lightning.

They are read by their attributes; transformers is imported if its arguments are passed, Lightning is not.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.lightning_module import ConfiguredOptimizer

if TYPE_CHECKING:
    import torch

MOST_KEPT = 1_000_000
"""Checkpoints that stay where there is no limit."""
_NARROW = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": None}
_UNMAPPED = (
    ("label_smoothing_factor", 0.0), ("neftune_noise_alpha", None), ("fsdp", None), ("deepspeed", None),
    ("optim_target_modules", None), ("auto_find_batch_size", False),
)  # fmt: skip
"""Options of `TrainingArguments` that change a step and have no equal here, with the values that leave them off."""


@dataclass(frozen=True)
class TrainerSettings:
    """The parts of a training loop's arguments that have an equal here.

    `accumulation` is the number of microbatches, `recomputes` whether activations are, `optimizer` that of the
    arguments, or None if they have none. `trains` says that the loop puts the model in training mode. `run` are keyword
    arguments of `dr.train`, `logs` the paths of its logs, and `early_stopping` the metric, patience, least improvement
    and mode of a run that ends early.
    """

    clip_norm: float | None = None
    precision: str | None = None
    accumulation: int = 1
    seed: int = 0
    recomputes: bool = False
    optimizer: ConfiguredOptimizer | None = None
    trains: bool = False
    run: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    early_stopping: tuple[str, int, float, str] | None = None


def read_arguments(arguments: Any, model: torch.nn.Module, steps_per_epoch: int | None) -> TrainerSettings:
    """Return the settings of `transformers.TrainingArguments`, for a model, or of a `Trainer` of Lightning.

    Raises `ImportModelError` for another object, for an option without an equal here that changes a step, and for
    epochs without `steps_per_epoch`.
    """
    if _is_of(arguments, "TrainingArguments", ("transformers",)):
        return _of_transformers(arguments, model, steps_per_epoch)
    if _is_of(arguments, "Trainer", ("pytorch_lightning", "lightning")):
        return _of_lightning(arguments, steps_per_epoch)
    raise ImportModelError(
        f"expected transformers.TrainingArguments or a lightning.Trainer, found {type(arguments).__name__}", "arguments"
    )


def _is_of(arguments: Any, name: str, packages: tuple[str, ...]) -> bool:
    return any(c.__name__ == name and c.__module__.split(".")[0] in packages for c in type(arguments).__mro__)


def _of_transformers(arguments: Any, model: torch.nn.Module, steps_per_epoch: int | None) -> TrainerSettings:
    where = "TrainingArguments"
    for name, off in _UNMAPPED:
        if (value := getattr(arguments, name, off)) not in (off, None, [], ""):
            raise ImportModelError(f"there is no equal of {name}={value!r}", where, "leave it out")
    steps = _steps(arguments.max_steps, arguments.num_train_epochs, steps_per_epoch, where)
    run: dict[str, Any] = {"steps": steps, "seed": arguments.data_seed or arguments.seed}
    if (every := _interval(arguments.save_strategy, arguments.save_steps, steps, steps_per_epoch)) is not None:
        run |= {"checkpoint": arguments.output_dir, "every": every, "keep": arguments.save_total_limit or MOST_KEPT}
        if arguments.resume_from_checkpoint:
            run["resume"] = "last"
    evaluations = arguments.eval_steps or arguments.logging_steps
    if (every := _interval(arguments.eval_strategy, evaluations, steps, steps_per_epoch)) is not None:
        run["evaluate_every"] = every
        if (metric := arguments.metric_for_best_model) and "checkpoint" in run:
            name, greater = metric.removeprefix("eval_"), arguments.greater_is_better
            run["best"] = f"{name}:max" if (greater or (greater is None and not name.endswith("loss"))) else name
    reports = [arguments.report_to] if isinstance(arguments.report_to, str) else list(arguments.report_to or ())
    logs = {"tensorboard": f"{arguments.output_dir}/runs/", "mlflow": "mlflow:"}
    precision = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else None
    return TrainerSettings(
        arguments.max_grad_norm or None, precision, arguments.gradient_accumulation_steps,
        arguments.seed, bool(arguments.gradient_checkpointing), _optimizer_of_transformers(arguments, model, steps),
        True, run, tuple(logs[name] for name in reports if name in logs),
    )  # fmt: skip


def _optimizer_of_transformers(arguments: Any, model: torch.nn.Module, steps: int) -> ConfiguredOptimizer:
    """Return the optimizer and the scheduler that transformers' own loop makes from its arguments."""
    import transformers

    # A Trainer refuses evaluations without their data.
    own = copy.copy(arguments)
    own.eval_strategy, own.load_best_model_at_end = "no", False
    with _random_numbers_kept():
        trainer = transformers.Trainer(model=model, args=own)
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    return ConfiguredOptimizer(trainer.optimizer, trainer.lr_scheduler)


def _of_lightning(trainer: Any, steps_per_epoch: int | None) -> TrainerSettings:
    where = "Trainer"
    if trainer.precision not in _NARROW:
        raise ImportModelError(
            f"expected the precision 32-true, bf16-mixed or 16-mixed, found {trainer.precision!r}", where
        )
    if trainer.gradient_clip_val and (trainer.gradient_clip_algorithm or "norm") != "norm":
        raise ImportModelError(
            f"expected gradients that are clipped by their norm, found {trainer.gradient_clip_algorithm!r}", where
        )
    steps = _steps(trainer.max_steps, trainer.max_epochs or 0, steps_per_epoch, where)
    run: dict[str, Any] = {"steps": steps}
    stopping = None
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        if kind == "ModelCheckpoint":
            every = callback._every_n_train_steps or (callback._every_n_epochs or 1) * (steps_per_epoch or steps)
            run |= {"checkpoint": str(callback.dirpath or f"{trainer.default_root_dir}/checkpoints"), "every": every}
            run["keep"] = callback.save_top_k if callback.save_top_k > 0 else MOST_KEPT
            if callback.monitor:
                run["best"] = f"{callback.monitor}:{callback.mode}"
        elif kind == "EarlyStopping":
            stopping = callback.monitor, callback.patience, abs(float(callback.min_delta)), callback.mode
    if (interval := trainer.val_check_interval) is not None and trainer.limit_val_batches:
        counts = isinstance(interval, int) and not isinstance(interval, bool)
        if counts or steps_per_epoch is not None:
            epochs = trainer.check_val_every_n_epoch or 1
            run["evaluate_every"] = interval if counts else max(1, round(interval * epochs * (steps_per_epoch or 1)))
    return TrainerSettings(
        trainer.gradient_clip_val or None, _NARROW[trainer.precision], trainer.accumulate_grad_batches, run=run,
        early_stopping=stopping,
    )  # fmt: skip


def _steps(steps: int, epochs: float, steps_per_epoch: int | None, where: str) -> int:
    """Return the number of steps of a run."""
    if steps and steps > 0:
        return steps
    if steps_per_epoch is None or epochs <= 0:
        raise ImportModelError(
            "expected the number of steps, found epochs", where,
            "set max_steps, or pass steps_per_epoch=len(loader)",
        )  # fmt: skip
    return max(1, math.ceil(epochs * steps_per_epoch))


def _interval(strategy: Any, every: float, steps: int, steps_per_epoch: int | None) -> int | None:
    """Return after how many steps something is done, or None for never. `every` below 1 is a part of all steps."""
    kind = str(getattr(strategy, "value", strategy))
    if kind == "no":
        return None
    if kind == "epoch":
        return steps_per_epoch or steps
    return max(1, math.ceil(every * steps)) if every < 1 else int(every)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Inside the context, seeds may be set: afterwards all generators have their state of before."""
    import numpy as np
    import torch

    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
