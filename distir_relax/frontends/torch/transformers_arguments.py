"""Settings of a run from transformers' `TrainingArguments`.

Every field is honoured, or neutral: it does not change the weights, the metrics or the checkpoints of a run. Any other
field, that of a subclass or of a later version too, must have its default.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.checkpoints import is_checkpoint
from distir_relax.frontends.torch.lightning_module import ConfiguredOptimizer
from distir_relax.frontends.torch.trainer_settings import MOST_KEPT, TrainerSettings, count_steps, no_equal

if TYPE_CHECKING:
    import torch

_WHERE = "TrainingArguments"
_OPTIMIZER = (
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 "
    "adam_beta2 adam_epsilon"
)
_HONOURED = (
    f"{_OPTIMIZER} output_dir num_train_epochs max_steps gradient_accumulation_steps max_grad_norm bf16 fp16 seed "
    "data_seed gradient_checkpointing activation_checkpointing label_smoothing_factor neftune_noise_alpha report_to "
    "save_strategy save_steps save_total_limit resume_from_checkpoint eval_strategy eval_steps logging_steps "
    "load_best_model_at_end metric_for_best_model greater_is_better train_sampling_strategy length_column_name"
)
_BATCHES = (
    "per_device_train_batch_size per_device_eval_batch_size dataloader_drop_last dataloader_num_workers "
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
    "dataloader_multiprocessing_context remove_unused_columns label_names accelerator_config "
    "average_tokens_across_devices"
)
"""Fields of the loader, which is the user's own, and whose batch is that of all ranks."""
_MACHINE = (
    "use_cpu tf32 full_determinism torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps "
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank fsdp_config use_cache debug "
    "liger_kernel_config save_on_each_node"
)
_SHOWN = (
    "do_train do_eval do_predict logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level "
    "log_level_replica include_num_input_tokens_seen disable_tqdm run_name project trackio_space_id trackio_bucket_id "
    "trackio_static_space_id skip_memory_metrics prediction_loss_only eval_do_concat_batches eval_use_gather_object "
    "eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model hub_token hub_private_repo "
    "hub_model_id hub_strategy hub_always_push hub_revision"
)
_KNOWN = frozenset(f"{_HONOURED} {_BATCHES} {_MACHINE} {_SHOWN}".split())
_LOGS = {"tensorboard": "{}/runs/", "mlflow": "mlflow:", "wandb": "wandb:"}
_SAMPLING = ("random", "sequential", "group_by_length")


def settings_of_transformers(arguments: Any, model: torch.nn.Module, steps_per_epoch: int | None) -> TrainerSettings:
    """Return the settings of `transformers.TrainingArguments` for a model; see `read_arguments` for errors."""
    _check_fields(arguments)
    steps = count_steps(arguments.max_steps, arguments.num_train_epochs, steps_per_epoch, _WHERE)
    reports = [arguments.report_to] if isinstance(arguments.report_to, str) else list(arguments.report_to or ())
    if unknown := [name for name in reports if name not in (*_LOGS, "none")]:
        raise no_equal("report_to", unknown[0], _WHERE, f"there are {', '.join(_LOGS)}, and dr.Callback for others")
    precision = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else None
    return TrainerSettings(
        clip_norm=arguments.max_grad_norm or None,
        precision=precision,
        accumulation=arguments.gradient_accumulation_steps,
        seed=arguments.seed,
        recomputes=bool(arguments.gradient_checkpointing or getattr(arguments, "activation_checkpointing", None)),
        optimizer=_optimizer(arguments, model, steps),
        trains=True,
        label_smoothing=arguments.label_smoothing_factor,
        neftune_noise_alpha=arguments.neftune_noise_alpha,
        run=_run(arguments, steps, steps_per_epoch),
        logs=tuple(_LOGS[name].format(arguments.output_dir) for name in reports if name in _LOGS),
    )


def _check_fields(arguments: Any) -> None:
    """Raise `ImportModelError` for a field that is not known, and has another value than its default."""
    for option in fields(arguments):
        value, default = getattr(arguments, option.name), _default(option)
        if option.name not in _KNOWN and value != default and (value or default):
            raise no_equal(option.name, value, _WHERE)


def _default(option: Field[Any]) -> Any:
    return None if option.default is MISSING else option.default


def _run(arguments: Any, steps: int, steps_per_epoch: int | None) -> dict[str, Any]:
    """Return the keyword arguments of `dr.train`."""
    run: dict[str, Any] = {
        "steps": steps,
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
    }
    sampling = str(arguments.train_sampling_strategy)
    if sampling not in _SAMPLING:
        raise no_equal("train_sampling_strategy", sampling, _WHERE, f"there are {', '.join(_SAMPLING)}")
    if sampling != "random":
        run |= {"in_order": True} if sampling == "sequential" else {"grouped_by": arguments.length_column_name}
    if (every := _interval(arguments.save_strategy, arguments.save_steps, steps, steps_per_epoch)) is not None:
        limit = arguments.save_total_limit or 0
        run |= {"checkpoint": arguments.output_dir, "every": every, "keep": limit if limit > 0 else MOST_KEPT}
    if source := arguments.resume_from_checkpoint:
        run["resume"] = _resumed(source, arguments.output_dir, "checkpoint" in run)
    evaluations = arguments.eval_steps or arguments.logging_steps
    if (every := _interval(arguments.eval_strategy, evaluations, steps, steps_per_epoch)) is not None:
        run["evaluate_every"] = every
        if (metric := arguments.metric_for_best_model) and "checkpoint" in run:
            name, greater = metric.removeprefix("eval_"), arguments.greater_is_better
            run["best"] = f"{name}:max" if (greater or (greater is None and not name.endswith("loss"))) else name
    if arguments.load_best_model_at_end:
        run["load_best"] = True
    if arguments.save_strategy == "best" and "best" not in run:
        raise no_equal(
            "save_strategy", "best", _WHERE, "give eval_strategy and metric_for_best_model, by which it is chosen"
        )
    return run


def _resumed(source: Any, folder: str, is_saved: bool) -> str:
    """Return the checkpoint from which a run resumes, in the terms of `dr.train`."""
    if source is True or Path(source).resolve() == Path(folder).resolve():
        return "last" if is_saved else folder
    if not is_checkpoint(Path(source)):
        raise no_equal(
            "resume_from_checkpoint", source, _WHERE,
            "give a checkpoint of dr.train, such as out/step-00000300, or True for the newest of output_dir",
        )  # fmt: skip
    return str(source)


def _interval(strategy: Any, every: float, steps: int, steps_per_epoch: int | None) -> int | None:
    """Return after how many steps something is done, or None for never. `every` below 1 is a part of all steps.

    Checkpoints of the best metric are written when it improves, and after the last step.
    """
    kind = str(getattr(strategy, "value", strategy))
    if kind == "no":
        return None
    if kind == "best":
        return steps
    if kind == "epoch":
        return steps_per_epoch or steps
    return max(1, math.ceil(every * steps)) if every < 1 else int(every)


def _optimizer(arguments: Any, model: torch.nn.Module, steps: int) -> ConfiguredOptimizer:
    """Return the optimizer and the scheduler that transformers' own loop makes from its arguments."""
    import transformers

    # A Trainer refuses evaluations without their data.
    own = copy.copy(arguments)
    own.eval_strategy, own.save_strategy, own.load_best_model_at_end = "no", "no", False
    with _random_numbers_kept():
        trainer = transformers.Trainer(model=model, args=own)
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    return ConfiguredOptimizer(trainer.optimizer, trainer.lr_scheduler)


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
