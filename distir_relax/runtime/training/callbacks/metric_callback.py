"""Callbacks that follow a metric: of evaluations, or in a run without them the training loss."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import Callback, RunInfo, StepResult
from distir_relax.runtime.training.options import Metric


class MetricCallback(Callback):
    """Follows a metric, of which smaller values are better (`mode` "min") or greater ones ("max").

    In a run without evaluations it is ``loss``, the training loss, of each step. Raises RunError for another mode, and
    when a run begins for a metric that its evaluations do not have.
    """

    def __init__(self, metric: str, mode: str) -> None:
        self.metric = Metric(metric, mode)
        self._evaluates = False

    @abstractmethod
    def observe(self, value: float, unit: str) -> None:
        """Take note of a value of the metric; `unit` is ``steps`` or ``evaluations``."""

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._evaluates = run.evaluates
        self.metric.check(run.metrics, type(self).__name__)
        if not run.evaluates and self.metric.name != "loss":
            raise RunError(
                f"expected the metric loss in a run without evaluations, found {self.metric.name!r}",
                type(self).__name__,
            )

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        if not self._evaluates:
            self.observe(result.loss, "steps")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self.observe(self.metric.of(metrics, type(self).__name__), "evaluations")

    @abstractmethod
    def kept(self) -> dict[str, Any]:
        """Return the numbers that a resumed run continues with, by name."""

    @abstractmethod
    def restore(self, numbers: dict[str, Any]) -> None:
        """Continue with the numbers of `kept`. Raises ValueError for others."""

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"metric": self.observed, **self.kept()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback`. Raises RunError for a state that is not one of this class."""
        name, expected = type(self).__name__, ["metric", *self.kept()]
        numbers = {key: value for key, value in state.items() if key != "metric"}
        if state.keys() == set(expected) and state["metric"] != self.observed:
            warnings.warn(f"{name} begins anew: it observed {state['metric']}, now {self.observed}", stacklevel=2)
            return
        try:
            if state.keys() != set(expected):
                raise ValueError
            self.restore(numbers)
        except (TypeError, ValueError):
            *names, last = expected
            raise RunError(
                f"expected {', '.join(names)} and {last}, found {state}", f"{name}.load_state_dict"
            ) from None

    @property
    def observed(self) -> str:
        """The metric and its unit, as text: ``loss:min of evaluations``."""
        return f"{self.metric.name}:{self.metric.mode} of {'evaluations' if self._evaluates else 'steps'}"
