"""Options of a training run, and the metric by which its best checkpoint is chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from distir_relax.checkpoints import is_checkpoint
from distir_relax.errors import RunError

EPOCH = "epoch"
"""The interval between the ends of two epochs."""
RESUME = ("last", "auto", "best")
"""Checkpoints from which a run resumes."""


@dataclass(frozen=True)
class Metric:
    """A metric by name, of which smaller values are better (`mode` is "min") or greater ones ("max").

    Raises RunError for another mode.
    """

    name: str
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max") or not self.name:
            raise RunError(
                f"expected the mode min or max of a metric, found {self.mode!r}", self.name or "the metric",
                "loss has the mode min; write accuracy:max, or EarlyStopping('accuracy', mode='max')",
            )  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> Metric:
        """Read ``NAME``, whose smallest value is the best, or ``NAME:max``. Raises RunError for another mode."""
        name, separator, mode = text.rpartition(":")
        return cls(name, mode) if separator else cls(text)

    def check(self, names: Collection[str], where: str) -> None:
        """Raise RunError if the metric is not among the names of an evaluation's, unless those are unknown (empty)."""
        if names and self.name not in names:
            raise RunError(
                f"expected the metric {self.name!r} of an evaluation, found {', '.join(names)}", where,
                "metrics are those with which the step was compiled: metrics={NAME: function}",
            )  # fmt: skip

    def of(self, metrics: Mapping[str, float], where: str) -> float:
        """Return the metric's value. Raises RunError if it is not among the metrics of an evaluation."""
        self.check(metrics or ("none",), where)
        return metrics[self.name]

    def improves(self, value: float, best: float | None, least: float = 0.0) -> bool:
        """Return whether `value` is better than `best` by more than `least`; any number is better than None."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return best - value > least if self.mode == "min" else value - best > least


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run: total steps or epochs, and the folder of checkpoints, written each `every` steps.

    One of `steps` and `epochs` is above 0; a run sets the steps of its epochs. `every` and `evaluate_every` may be
    "epoch".

    `resume` is "last" to resume from the newest checkpoint, which must exist and be complete, "auto" to resume from the
    newest complete one, or start if there is none, "best" to resume from the best one, the path of a checkpoint, in any
    folder, or empty. `seed` is that of the
    order of samples; None is 0, or that of the resumed run. `best` is the metric whose best checkpoint is kept
    (`Metric.parse`), or empty. A run that evaluates does so each `evaluate_every` steps, and after the last.

    With `load_best` it ends with the weights and the state of that checkpoint. With `verify_replicas` above 0, the
    replicas of the state are compared each so many steps, and before a checkpoint is written.

    Raises RunError for values outside of their range, for `resume` and `best` without a folder of checkpoints, and for
    `load_best` without `best`.
    """

    steps: int = 0
    checkpoints: Path | None = None
    every: int | str = 100
    keep: int = 3
    resume: str = ""
    seed: int | None = None
    best: str = ""
    evaluate_every: int | str = 100
    load_best: bool = False
    epochs: int = 0
    verify_replicas: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "keep", "evaluate_every"):
            value = getattr(self, name)
            if value == EPOCH and name != "keep":
                continue
            if not isinstance(value, int) or value < 1:
                raise RunError(f"expected 1 or more{', or epoch' * (name != 'keep')}, found {value!r}", name)
        if not isinstance(self.verify_replicas, int) or self.verify_replicas < 0:
            raise RunError(f"expected 0 or more steps, found {self.verify_replicas!r}", "verify_replicas")
        if min(self.steps, self.epochs) < 0 or bool(self.steps) == bool(self.epochs):
            raise RunError(
                f"expected 1 or more steps, or epochs, found {self.steps} steps and {self.epochs} epochs",
                "steps, epochs",
            )
        if self.resume not in ("", *RESUME) and not (isinstance(self.resume, str) and is_checkpoint(Path(self.resume))):
            raise RunError(
                f"expected {', '.join(RESUME)}, the path of a checkpoint, or nothing, found {self.resume!r}", "resume",
                "'auto' continues from the newest checkpoint if there is one, 'last' needs one",
            )  # fmt: skip
        hint = "give --checkpoint DIR"
        if self.resume in RESUME and self.checkpoints is None:
            raise RunError("expected a checkpoint folder to resume from, found none", "--resume", hint)
        if self.best and self.checkpoints is None:
            raise RunError("expected a checkpoint folder for the best one, found none", "--best", hint)
        if self.load_best and not self.best:
            raise RunError("expected the metric of the best checkpoint, found none", "load_best", "pass best='loss'")
        if self.best:
            Metric.parse(self.best)
