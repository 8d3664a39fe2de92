"""Measurements of a training run, for its report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distir_relax.runtime.training.callbacks import Ended, RunInfo, StepResult


@dataclass
class RunRecord:
    """Measurements of a run on its first process.

    `evaluations` are metrics by the step after which they were measured, `saved` the steps of checkpoints. `ended` is
    None if the run ended with an error.
    """

    run: RunInfo
    steps: list[StepResult] = field(default_factory=list)
    evaluations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def losses(self) -> list[tuple[float, float]]:
        """The loss of each step."""
        return [(result.step, result.loss) for result in self.steps]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the run by what the first process did in them.

        A first step prepares kernels and memory, so it is apart. Communication includes waiting for other ranks.
        """
        first, later = self.steps[0], self.steps[1:]
        communication = math.fsum(result.communication_seconds for result in later)
        data = math.fsum(result.data_seconds for result in later)
        compute = math.fsum(result.seconds for result in later) - communication - data
        ended = self.ended or Ended(0)
        return {
            "compute": compute, "communication": communication, "data": data, "first step": first.seconds,
            "evaluation": ended.evaluation_seconds, "checkpoints": ended.checkpoint_seconds,
        }  # fmt: skip

    def median(self, measurement: Callable[[StepResult], float]) -> float:
        """Return the median of a measurement over the steps after the first, which prepares kernels and memory."""
        return statistics.median(map(measurement, self.steps[1:] or self.steps))
