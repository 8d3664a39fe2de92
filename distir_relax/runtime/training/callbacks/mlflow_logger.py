"""MLflow log of a training run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.optional_package import check_installed
from distir_relax.runtime.training.callbacks.tracker import Tracker


class MLflowLogger(Tracker):
    """A run of an MLflow experiment: options as parameters, measurements of steps and evaluations as metrics.

    `uri` is the tracking server or store, by default MLflow's own choice (the variable ``MLFLOW_TRACKING_URI``). The
    experiment has the program's name unless another is passed. Raises RunError without the package `mlflow`, and for
    errors of MLflow.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        check_installed("mlflow", f"mlflow:{uri or ''}")
        self.uri, self.experiment = uri, experiment
        self._client: Any = None
        self._failure: type[Exception] = Exception
        self._run = ""

    def begin(self, name: str, parameters: Mapping[str, float | str]) -> None:
        """See `Tracker`."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._failure = MlflowException
        name = self.experiment or name
        try:
            self._client = MlflowClient(self.uri)
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
            self._run = self._client.create_run(experiment).info.run_id
            for key, value in parameters.items():
                self._client.log_param(self._run, key, value)
        except self._failure as wrong:
            raise self._error(wrong) from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric as Entry

        now = round(time.time() * 1000)
        try:
            self._client.log_batch(self._run, [Entry(name, float(value), now, step) for name, value in values.items()])
        except self._failure as wrong:
            raise self._error(wrong) from None

    def end(self, status: str) -> None:
        """See `Tracker`."""
        # The error that ended the run is the one to report.
        with suppress(self._failure):
            if self._run:
                self._client.set_terminated(self._run, status.upper())

    def _error(self, wrong: Exception) -> RunError:
        return RunError(f"MLflow reports an error: {wrong}", f"mlflow:{self.uri or ''}", "is the server running?")
