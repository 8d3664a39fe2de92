"""Protocol of trackers of experiments: three methods that a service needs, in place of all those of a callback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from distir_relax.runtime.training.callbacks.callback import Callback, Ended, RunInfo, StepResult
from distir_relax.runtime.training.callbacks.measurements import evaluation_measurements, step_measurements

FINISHED, KILLED, FAILED = "finished", "killed", "failed"
"""How a run ended: by itself, by a signal, or by an error."""


class Tracker(Callback, ABC):
    """A log of a run in a service, or wherever `begin`, `log` and `end` write. Subclasses have these three methods."""

    _unit = ""
    _status = ""

    @abstractmethod
    def begin(self, name: str, parameters: Mapping[str, float | str]) -> None:
        """Begin the run of a program of this name.

        `parameters` are the options of the run by name: ``steps``, ``ranks``, ``first_step``, which is above 1 for a
        resumed run, and so on.
        """

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write measurements of a step by name, or those of an evaluation after it: ``evaluation/loss``."""

    @abstractmethod
    def end(self, status: str) -> None:
        """End the run: `FINISHED`, `KILLED` or `FAILED`."""

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._unit = run.unit
        parameters: dict[str, float | str] = {
            "program": run.manifest.name,
            "ranks": run.manifest.mesh.size,
            "steps": run.options.steps,
            "first_step": run.step + 1,
            f"{run.unit}_per_step": run.work,
        }
        self._status = FAILED
        self.begin(run.manifest.name, parameters)

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self.log(step_measurements(result, self._unit), result.step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self.log(evaluation_measurements(metrics), step)

    def ended(self, ended: Ended) -> None:
        """See `Callback`."""
        self._status = KILLED if ended.signal else FINISHED

    def close(self) -> None:
        """See `Callback`."""
        if self._status:
            status, self._status = self._status, ""
            self.end(status)
