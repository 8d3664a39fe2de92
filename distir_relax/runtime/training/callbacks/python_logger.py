"""Log of a training run by Python's `logging`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from distir_relax.runtime.training.callbacks.tracker import FINISHED, Tracker

NAME = "distir_relax"
"""The logger that is used by default."""


class PythonLogger(Tracker):
    """Lines of Python's `logging`, one for each step and each evaluation, of the level INFO unless another is passed.

    The measurements are in the record, too, as its attribute ``measurements``. A run that does not finish has a last
    line of the level WARNING. What becomes of them is up to the program: ``logging.basicConfig(level="INFO")``.
    """

    def __init__(self, name: str = NAME, level: int = logging.INFO) -> None:
        self._logger, self._level = logging.getLogger(name), level

    def begin(self, name: str, parameters: Mapping[str, float | str]) -> None:
        """See `Tracker`."""
        shown = ", ".join(f"{key} {value}" for key, value in parameters.items() if key != "program")
        self._logger.log(self._level, "training of %s: %s", name, shown, extra={"measurements": dict(parameters)})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        shown = ", ".join(f"{key} {value:.6g}" for key, value in values.items())
        self._logger.log(self._level, "step %d: %s", step, shown, extra={"measurements": {**values, "step": step}})

    def end(self, status: str) -> None:
        """See `Tracker`."""
        level = self._level if status == FINISHED else max(self._level, logging.WARNING)
        self._logger.log(level, "training %s", status)
