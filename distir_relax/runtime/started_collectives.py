"""Collectives that run while their rank computes: a thread of the rank executes them in the order of their starts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from distir_relax.runtime.progress import Traffic


class Started:
    """A collective that a rank has started. `result` waits for it; it returns the result and the bytes sent, or raises
    what the collective raised."""

    __slots__ = ("result",)

    def __init__(self, result: Callable[[], tuple[Any, Traffic]]) -> None:
        self.result = result


class CommunicationThread:
    """The thread of a rank's started collectives; `execute` runs one on a communicator that nobody else uses."""

    def __init__(self, execute: Callable[..., tuple[Any, Traffic]]) -> None:
        self._execute = execute
        # Its thread ends with it.
        self._executor = ThreadPoolExecutor(1, "distir-communication")
        self._last: Future[Any] | None = None

    def start(self, *arguments: Any) -> Started:
        """Start to execute a collective with these arguments."""
        future = self._last = self._executor.submit(_in_inference_mode, self._execute, arguments)
        return Started(future.result)

    def wait(self) -> None:
        """Wait until all started collectives have ended or failed."""
        if self._last is not None:
            wait([self._last])
            self._last = None


def _in_inference_mode(execute: Callable[..., tuple[Any, Traffic]], arguments: tuple[Any, ...]) -> tuple[Any, Traffic]:
    import torch

    # Modes of torch are those of a thread.
    with torch.inference_mode():
        return execute(*arguments)
