"""End of a training run after some time."""

from __future__ import annotations

import time

from distir_relax.errors import RunError
from distir_relax.runtime.training.callbacks.callback import Callback, RunInfo, StepResult


class TimeLimit(Callback):
    """End the run after the first step that ends later than `seconds` after its start; a resumed run counts anew.

    Raises RunError for a limit that is not positive.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise RunError(f"expected more than 0 seconds, found {seconds}", "TimeLimit")
        self.seconds = seconds
        self._begun = 0.0

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._begun = time.monotonic()

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        if time.monotonic() - self._begun >= self.seconds:
            self.stop(f"the limit of {self.seconds:g} seconds is reached")
