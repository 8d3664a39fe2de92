"""Collectives that run while their rank computes: a thread of the rank executes them in the order of their starts.

The thread has a communicator of its own, so that its messages and those of the rank's program cannot meet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distir_relax.runtime.communicator import Communicator


class Started:
    """A collective that a rank has started; `result` waits for it, and raises what it raised."""

    __slots__ = ("result",)

    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result


class CommunicationThread:
    """The thread that executes a rank's started collectives with the communicator `channel`, which no one else uses."""

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        # Its thread ends with it.
        self._executor = ThreadPoolExecutor(1, "distir-communication")
        self._last: Future[Any] | None = None

    def start(self, kind: str, x: Any, axis: str, *arguments: Any) -> Callable[[], Any]:
        """Start the collective that the method `kind` of communicators executes; return a function that waits for it.

        `x` must not change before.
        """
        future = self._last = self._executor.submit(_execute, self._channel, kind, x, axis, arguments)
        return future.result

    def wait(self) -> None:
        """Wait until all started collectives have ended or failed."""
        if self._last is not None:
            wait([self._last])
            self._last = None


def _execute(channel: Communicator, kind: str, x: Any, axis: str, arguments: tuple[Any, ...]) -> Any:
    import torch

    # Modes of torch are those of a thread.
    with torch.inference_mode():
        channel.wait_for_group(axis)
        return getattr(channel, kind)(x, axis, *arguments)
