"""The parts of another training loop's arguments that have an equal here, and the counts that all loops share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.lightning_module import ConfiguredOptimizer

MOST_KEPT = 1_000_000
"""Checkpoints that stay where there is no limit."""


@dataclass(frozen=True)
class TrainerSettings:
    """The parts of a training loop's arguments that have an equal here.

    `accumulation` is the number of microbatches, `recomputes` whether activations are, `optimizer` that of the
    arguments, or None if they have none. `trains` says that the loop puts the model in training mode. `run` are keyword
    arguments of `dr.train`, `logs` the paths of its logs, `early_stopping` the arguments of each callback
    that ends a run early, `max_seconds` the time after which it ends, and `steps_per_epoch` the steps of an
    epoch, if they are limited. `label_smoothing` and `neftune_noise_alpha` are options of `dr.Training`.
    """

    clip_norm: float | None = None
    precision: str | None = None
    accumulation: int = 1
    seed: int = 0
    recomputes: bool = False
    optimizer: ConfiguredOptimizer | None = None
    trains: bool = False
    label_smoothing: float = 0.0
    neftune_noise_alpha: float | None = None
    run: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    early_stopping: tuple[dict[str, Any], ...] = ()
    max_seconds: float | None = None
    steps_per_epoch: int | None = None


def no_equal(option: str, value: Any, where: str, hint: str = "leave it out") -> ImportModelError:
    """Return the error for an option of a loop that changes a run, and has no equal here."""
    return ImportModelError(f"there is no equal of {option}={value!r}", where, hint)


def count_steps(steps: int, epochs: float, steps_per_epoch: int | None, where: str) -> int:
    """Return the number of steps of a run. Raise `ImportModelError` for epochs of an unknown number of steps."""
    if steps and steps > 0:
        return steps
    if steps_per_epoch is None or epochs <= 0:
        raise ImportModelError(
            "expected the number of steps, found epochs", where,
            "set max_steps, or pass steps_per_epoch=len(loader)",
        )  # fmt: skip
    return max(1, math.ceil(epochs * steps_per_epoch))
