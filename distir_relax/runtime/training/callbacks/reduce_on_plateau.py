"""Smaller learning rates when a metric has stopped to improve: `torch.optim.lr_scheduler.ReduceLROnPlateau`."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import RunInfo
from distir_relax.runtime.training.callbacks.metric_callback import MetricCallback


class ReduceOnPlateau(MetricCallback):
    """Multiply the learning rates by `factor` after more than `patience` evaluations in a row without an improvement.

    A value improves on the best one by more than a part `threshold` of it. After a reduction, `cooldown` evaluations
    are not counted. All rates, those of their schedules, are multiplied, down to a factor of `least`. In a run without
    evaluations the metric is ``loss``, the training loss, and steps are counted. A resumed run continues.

    Raises RunError for numbers out of range, for a mode other than "min" and "max", and for a metric that evaluations
    do not have.
    """

    changes_rates = True

    def __init__(
        self, metric: str = "loss", factor: float = 0.1, patience: int = 10, *, mode: str = "min",
        threshold: float = 1e-4, cooldown: int = 0, least: float = 0.0,
    ) -> None:  # fmt: skip
        if not 0 < factor < 1 or not 0 <= least < 1:
            raise RunError(f"expected factors below 1, found factor={factor} and least={least}", "ReduceOnPlateau")
        if min(patience, cooldown) < 0 or threshold < 0:
            raise RunError(
                f"expected numbers of at least 0, found {patience}, {cooldown} and {threshold}", "ReduceOnPlateau"
            )
        super().__init__(metric, mode)
        self.factor, self.patience, self.threshold = factor, patience, threshold
        self.cooldown, self.least = cooldown, least
        self._best = math.inf
        self._restart()

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._restart()
        super().begun(run)

    def kept(self) -> dict[str, Any]:
        """See `MetricCallback`."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "count": self._count, "waits": self._waits, "rate_factor": self.rate_factor}

    def restore(self, numbers: dict[str, Any]) -> None:
        """See `MetricCallback`."""
        best, factor = numbers["best"], float(numbers["rate_factor"])
        self._best = self._best if best is None else float(best)
        self._count, self._waits, self.rate_factor = int(numbers["count"]), int(numbers["waits"]), factor

    def observe(self, value: float, unit: str) -> None:
        """See `MetricCallback`."""
        # As in torch, also for values below 0, whose part is a smaller value.
        is_better = (
            value < self._best * (1 - self.threshold) if self.metric.mode == "min"
            else value > self._best * (1 + self.threshold)
        )  # fmt: skip
        if is_better:
            self._best, self._count = value, 0
        else:
            self._count += 1
        if self._waits:
            self._waits, self._count = self._waits - 1, 0
        if self._count > self.patience:
            self.rate_factor = max(self.rate_factor * self.factor, self.least)
            self._waits, self._count = self.cooldown, 0

    def _restart(self) -> None:
        self._best = math.inf if self.metric.mode == "min" else -math.inf
        self._count = self._waits = 0
        self.rate_factor = 1.0
