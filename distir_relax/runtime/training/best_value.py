"""Best value of a metric so far, by which a run keeps its best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

from distir_relax.errors import RunError
from distir_relax.runtime.training.options import Metric


class BestValue:
    """The best value of a metric, and the finite metrics at present.

    In a run that evaluates, values are those of evaluations. In another one the metric is ``loss``, the mean training
    loss since the last checkpoint.
    """

    def __init__(self, metric: Metric, evaluates: bool, best: float | None = None) -> None:
        if not evaluates and metric.name != "loss":
            raise RunError(f"expected the metric loss in a run without evaluations, found {metric.name!r}", "--best")
        self._metric, self._best = metric, best
        self._losses: list[float] = []
        self.metrics: dict[str, float] = {}

    def add_loss(self, loss: float) -> None:
        """Add the loss of a step."""
        self._losses.append(loss)

    def add_mean_loss(self) -> bool:
        """Take the mean of the losses since the last call as value; return whether it is the best so far."""
        losses, self._losses = self._losses, []
        return bool(losses) and self.add({"loss": sum(losses) / len(losses)})

    def add(self, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of an evaluation; return whether the value is the best so far.

        Raises RunError if the metric is not among them.
        """
        value = self._metric.of(metrics, "--best")
        self.metrics = {name: number for name, number in metrics.items() if math.isfinite(number)}
        improves = self._metric.improves(value, self._best)
        if improves:
            self._best = value
        return improves
