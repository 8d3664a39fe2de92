"""Data and callbacks of `distir train`, from a user's functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.checkpoints import DataPosition
from distir_relax.errors import ImportModelError
from distir_relax.runtime.training.batches import Data
from distir_relax.runtime.training.callbacks import Callback, Ended, RunInfo, StepResult
from distir_relax.runtime.training.callbacks.states import load_states, states_of
from distir_relax.runtime.training.data_sources import open_evaluation, open_function
from distir_relax.runtime.training.executor import Batch
from distir_relax.support.user_function import call_function, find_function, users_code

if TYPE_CHECKING:
    import torch


Arrange = Callable[[Any], Any]
"""Change of the order or the number of batches of an epoch."""


def load_data(target: str, arranged: Arrange = lambda data: data) -> Callable[[Manifest, int, DataPosition], Data]:
    """Return a function from a program's manifest, a seed and a position to the data of ``FILE.py:FUNCTION``.

    FUNCTION returns an object that `open_data` takes, and `arranged` gives another one for it. If it has the parameters
    `start` and `seed`, it receives the number of the first batch, and the seed. Raises `ImportModelError` if it is
    missing or raises, and RunError if it returns something else.
    """
    function = find_function(target)
    takes_start = "start" in inspect.signature(function).parameters
    file = target.rpartition(":")[0]

    def open_target(manifest: Manifest, seed: int, position: DataPosition) -> Data:
        def call(start: int | None) -> Any:
            return arranged(call_function(function, target, {"seed": seed, "start": start}))

        guard = lambda action, when: users_code(action, file, when)  # noqa: E731
        return open_function(call, takes_start, manifest, seed, position, guard)

    return open_target


def load_evaluation(
    target: str, arranged: Arrange = lambda data: data
) -> Callable[[Manifest], Callable[[], Iterable[Batch]]]:
    """Return a function from the manifest of an evaluation to one that yields the batches of ``FILE.py:FUNCTION``.

    Raises `ImportModelError` if the function is missing. Its result is as for `load_data`.
    """
    function = find_function(target)
    file = target.rpartition(":")[0]

    def call() -> Any:
        return arranged(call_function(function, target, {}))

    return lambda manifest: open_evaluation(call, manifest, lambda action, when: users_code(action, file, when))


class UserCallbacks(Callback):
    """The callbacks that ``FILE.py:FUNCTION`` returns, one or several; their errors show the user's own frames.

    The function is called when the run begins, on its first process. Raises `ImportModelError` if it is missing, and
    when the run begins if it raises or returns something else.
    """

    def __init__(self, target: str) -> None:
        self._target, self._function = target, find_function(target)
        self._callbacks: list[Callback] = []

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        result = call_function(self._function, self._target, {})
        callbacks = list(result) if isinstance(result, (list, tuple)) else [result]
        if not all(isinstance(callback, Callback) for callback in callbacks):
            raise ImportModelError(
                f"expected a dr.Callback or a list of them, found {type(result).__name__}", self._target,
                "derive the class from dr.Callback, and return an object of it",
            )  # fmt: skip
        self._callbacks = callbacks
        self.weights_every = math.gcd(*(callback.weights_every for callback in callbacks))
        self.changes_rates = any(callback.changes_rates for callback in callbacks)
        self._call("begun", run)

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self._call("done", result)

    def weights(self, step: int, tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Callback`."""
        replaced: dict[str, torch.Tensor] = {}
        for callback in self._callbacks:
            if callback.weights_every and step % callback.weights_every == 0:
                replaced |= self._called(callback, "weights", step, {**tensors, **replaced}) or {}
        return replaced

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self._call("evaluated", step, metrics)

    def saved(self, path: Path, step: int) -> None:
        """See `Callback`."""
        self._call("saved", path, step)

    def ended(self, ended: Ended) -> None:
        """See `Callback`."""
        self._call("ended", ended)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        states = self._guarded(lambda: states_of(self._callbacks), "asked for its state")
        return {"callbacks": states} if states else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Callback`."""
        self._guarded(lambda: load_states(self._callbacks, state.get("callbacks", [])), "given its state")
        self._read_rates()

    def close(self) -> None:
        """See `Callback`."""
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            self._called(callback, method, *arguments)
            if callback.stop_reason:
                self.stop(callback.stop_reason)

    def _called(self, callback: Callback, method: str, *arguments: Any) -> Any:
        function = partial(getattr(callback, method), *arguments)
        result = self._guarded(function, f"called ({type(callback).__name__}.{method})")
        self._read_rates()
        return result

    def _read_rates(self) -> None:
        self.rate_factor = math.prod(callback.rate_factor for callback in self._callbacks if callback.changes_rates)

    def _guarded(self, action: Callable[[], Any], moment: str) -> Any:
        return users_code(action, self._target.rpartition(":")[0], f"was {moment}")
