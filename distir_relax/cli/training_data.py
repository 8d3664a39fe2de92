"""Data and callbacks of `distir train`, from a user's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distir_relax.bundle import Manifest
from distir_relax.errors import ImportModelError
from distir_relax.runtime.training.batches import Data
from distir_relax.runtime.training.callbacks import Callback, Ended, RunInfo, StepResult
from distir_relax.runtime.training.data_sources import open_function
from distir_relax.support.user_function import call_function, find_function, users_code


def load_data(target: str) -> Callable[[Manifest, int], Data]:
    """Return a function from a program's manifest and a seed to the data of ``FILE.py:FUNCTION``.

    FUNCTION returns an object that `open_data` takes. If it has the parameters `start` and `seed`, it receives the
    number of the first step, and the seed. Raises `ImportModelError` if it is missing or raises, and RunError if it
    returns something else.
    """
    function = find_function(target)
    takes_start = "start" in inspect.signature(function).parameters
    file = target.rpartition(":")[0]

    def open_target(manifest: Manifest, seed: int) -> Data:
        def call(start: int | None) -> Any:
            return call_function(function, target, {"seed": seed, "start": start})

        return open_function(call, takes_start, manifest, seed, lambda action, when: users_code(action, file, when))

    return open_target


def load_callbacks(target: str) -> list[Callback]:
    """Return the callbacks of ``FILE.py:FUNCTION``, which returns one or several.

    Raises `ImportModelError` if the function is missing, raises, or returns something else.
    """
    result = call_function(find_function(target), target, {})
    callbacks = [result] if isinstance(result, Callback) else result
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise ImportModelError(
            f"expected a dr.Callback or a list of them, found {type(result).__name__}", target,
            "derive the class from dr.Callback, and return an object of it",
        )  # fmt: skip
    return [_UserCallback(callback, target.rpartition(":")[0]) for callback in callbacks]


class _UserCallback(Callback):
    """A callback whose errors show the user's own frames."""

    def __init__(self, callback: Callback, file: str) -> None:
        self._callback, self._file = callback, file

    @property
    def stop_reason(self) -> str:
        """See `Callback`."""
        return self._callback.stop_reason

    @stop_reason.setter
    def stop_reason(self, reason: str) -> None:
        self._callback.stop_reason = reason

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._call("begun", run)

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self._call("done", result)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self._call("evaluated", step, metrics)

    def saved(self, path: Path, step: int) -> None:
        """See `Callback`."""
        self._call("saved", path, step)

    def ended(self, ended: Ended) -> None:
        """See `Callback`."""
        self._call("ended", ended)

    def close(self) -> None:
        """See `Callback`."""
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        name = f"was called ({type(self._callback).__name__}.{method})"
        users_code(lambda: getattr(self._callback, method)(*arguments), self._file, name)
