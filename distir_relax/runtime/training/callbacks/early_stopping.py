"""End of a training run when a metric has stopped to improve."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import RunInfo
from distir_relax.runtime.training.callbacks.metric_callback import MetricCallback


class EarlyStopping(MetricCallback):
    """End the run after `patience` evaluations in a row that do not improve a metric by more than `min_delta`.

    In a run without evaluations the metric is ``loss``, the training loss, and `patience` counts steps. A resumed run
    continues the count of its checkpoint.

    The run ends at once when the metric is better than `stopping_threshold` or worse than `divergence_threshold`, and
    with `check_finite` when it is infinite or NaN, as in Lightning. Raises RunError for a mode other than "min" and
    "max", and for a metric that evaluations do not have.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min", *,
        stopping_threshold: float | None = None, divergence_threshold: float | None = None, check_finite: bool = False,
    ) -> None:  # fmt: skip
        if patience < 1 or min_delta < 0:
            raise RunError(
                f"expected a patience of 1 or more and min_delta of 0 or more, found {patience} and {min_delta}",
                "EarlyStopping",
            )
        super().__init__(metric, mode)
        self.patience, self.min_delta = patience, min_delta
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_finite = check_finite
        self._best: float | None = None
        self._count = 0

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._best, self._count = None, 0
        super().begun(run)

    def kept(self) -> dict[str, Any]:
        """See `MetricCallback`."""
        best = self._best if self._best is not None and math.isfinite(self._best) else None
        return {"best": best, "count": self._count}

    def restore(self, numbers: dict[str, Any]) -> None:
        """See `MetricCallback`."""
        best, count = numbers["best"], numbers["count"]
        if not isinstance(count, int) or not isinstance(best, (int, float, type(None))):
            raise ValueError
        self._best, self._count = best, count

    def observe(self, value: float, unit: str) -> None:
        """See `MetricCallback`."""
        if reason := self._limit(value):
            self.stop(f"{self.metric.name} is {value:.6g}, {reason}")
            return
        if self.metric.improves(value, self._best, self.min_delta):
            self._best, self._count = value, 0
            return
        self._count += 1
        if self._count >= self.patience:
            best = "none" if self._best is None else f"{self._best:.6g}"
            self.stop(f"{self.metric.name} has not improved in {self._count} {unit}, the best is {best}")

    def _limit(self, value: float) -> str:
        """Return which limit a value has passed, or an empty text."""
        best, worst = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return "which is not finite"
        if best is not None and self.metric.improves(value, best):
            return f"better than the stopping threshold {best:g}"
        if worst is not None and (value > worst if self.metric.mode == "min" else value < worst):
            return f"worse than the divergence threshold {worst:g}"
        return ""
