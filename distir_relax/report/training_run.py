"""Report page of a training run: curves, where its time went, and the prediction beside the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distir_relax.calibration.machine_check import warn_of_mismatch
from distir_relax.compiler.simulate import simulate
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.report.run_record import RunRecord
from distir_relax.report.training_page import write_training_page
from distir_relax.runtime.inputs import check_writable
from distir_relax.runtime.training.callbacks import Callback, Ended, RunInfo, StepResult
from distir_relax.simulation.simulation import Simulation


class RunReport(Callback):
    """Write a page about the run to `path`, when it ends, also by an error.

    With a `model`, anything that `dr.simulate` takes, such as the step or the bundle's path, the step is predicted for
    the machine of `profile`, and shown beside the measurement. Raises `ProfileError` for an unknown profile, RunError
    if the file cannot be written, and when the run begins, what `dr.simulate` raises.
    """

    def __init__(self, path: str | Path, model: Any = None, profile: Profile | str | Path | None = None) -> None:
        check_writable(path)
        self.path = Path(path)
        self._model = model
        self._profile = None if profile is None else as_profile(profile)
        self._record: RunRecord | None = None
        self._predicted: Simulation | None = None

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        # Predicted before the run, which an error then does not end.
        if self._model is not None and self._profile is not None:
            warn_of_mismatch(self._profile)
            self._predicted = simulate(self._model, profile=self._profile)
        self._record = RunRecord(run)

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        assert self._record is not None, "the run has begun"
        self._record.steps.append(result)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        assert self._record is not None, "the run has begun"
        self._record.evaluations[step] = metrics

    def saved(self, path: Path, step: int) -> None:
        """See `Callback`."""
        assert self._record is not None, "the run has begun"
        self._record.saved.append(step)

    def ended(self, ended: Ended) -> None:
        """See `Callback`."""
        if self._record is not None:
            self._record.ended = ended

    def close(self) -> None:
        """See `Callback`."""
        record, self._record = self._record, None
        if record is not None and record.steps:
            write_training_page(record, self._predicted, self.path)
