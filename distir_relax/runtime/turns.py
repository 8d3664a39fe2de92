"""Exclusive access for threads and coroutines, in order of arrival."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from distir_relax.errors import RunError


@dataclass(eq=False)
class _Turn:
    """A wait for the turn, of a thread and, if it runs an event loop, its task."""

    thread: int = field(default_factory=threading.get_ident)
    task: Any = field(default_factory=lambda: _current_task())
    granted: Future[None] = field(default_factory=Future)


class Turns:
    """A lock that a thread waits for with `taken`, and a coroutine with `taken_async`.

    Raises RunError with the message `own` for a wait that could not end: of a caller that has the turn itself, in a
    stream that it has not closed.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._guard = threading.Lock()
        self._waiting: deque[_Turn] = deque()
        self._holder: _Turn | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a caller has the turn."""
        return self._holder is not None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, and have it while the block runs."""
        turn, holder = _Turn(), self._holder
        if holder is not None and holder.thread == turn.thread:
            raise self._own_turn()
        try:
            self._request(turn)
            turn.granted.result()
            yield
        finally:
            self._leave(turn)

    @asynccontextmanager
    async def taken_async(self) -> AsyncIterator[None]:
        """Wait for the turn without blocking the event loop, and have it while the block runs."""
        turn, holder = _Turn(), self._holder
        if holder is not None and (holder.thread, holder.task) == (turn.thread, turn.task):
            raise self._own_turn()
        try:
            self._request(turn)
            await asyncio.wrap_future(turn.granted)
            yield
        finally:
            self._leave(turn)

    def _own_turn(self) -> RunError:
        return RunError(self._own, hint="exhaust or close() the iterator first")

    def _request(self, turn: _Turn) -> None:
        with self._guard:
            self._waiting.append(turn)
            if self._holder is None:
                self._pass_on()

    def _leave(self, turn: _Turn) -> None:
        with self._guard:
            if self._holder is turn:
                self._pass_on()
            else:
                turn.granted.cancel()

    def _pass_on(self) -> None:
        """Give the turn to the first caller that still waits for it."""
        self._holder = None
        while self._waiting and self._holder is None:
            following = self._waiting.popleft()
            if following.granted.set_running_or_notify_cancel():
                self._holder = following
                following.granted.set_result(None)


def _current_task() -> Any:
    with suppress(RuntimeError):
        return asyncio.current_task()
    return None
