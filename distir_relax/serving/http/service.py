"""The engine in a thread of its own, and its restart after a rank has failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distir_relax.errors import RunError
from distir_relax.serving.engine import Engine

_LOG = logging.getLogger("distir_relax.serving")
_PAUSE = 1.0
"""Seconds between attempts to start the engine again."""


class EngineService:
    """Runs the steps of an engine while it has requests. `start` makes an engine, also after one has failed."""

    def __init__(self, start: Callable[[], Engine]) -> None:
        self._start = start
        self._engine: Engine | None = start()
        self.failure = ""
        self.restarts = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine. Raises `RunError` while it is being started again."""
        if self._engine is None:
            raise RunError(f"the engine is being started again: {self.failure}", hint="try again in a moment")
        return self._engine

    @property
    def ready_engine(self) -> Engine | None:
        """The engine; None while it is being started or closed."""
        return None if self._closing else self._engine

    @property
    def is_ready(self) -> bool:
        """Whether requests can be submitted."""
        return self.ready_engine is not None

    def submit(self, prompt: Any, count: int, **options: Any) -> Any:
        """Submit a request to the engine, as `Engine.submit`, and wake its thread."""
        request = self.engine.submit(prompt, count, **options)
        self._wake.set()
        return request

    def idle(self) -> list[float]:
        """Return `Engine.idle`, empty if it does not answer: its requests get the reason."""
        engine = self._engine
        with suppress(RunError):
            return engine.idle() if engine is not None else []
        return []

    def close(self) -> None:
        """Cancel all requests and release the ranks."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            engine = self._engine
            try:
                if engine is None:
                    self._restart()
                elif not engine.step():
                    self._wake.wait()
                    self._wake.clear()
            except Exception as error:
                self._failed("the engine failed and is started again: %s", error)
                self._engine = None
        if self._engine is not None:
            if self._engine.steps:
                shares = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(self.idle()))
                _LOG.info("idle while requests ran: %s", shares)
            self._engine.close()

    def _restart(self) -> None:
        try:
            self._engine = self._start()
        except Exception as error:
            self._failed(f"the engine could not be started, and is again in {_PAUSE:g} s: %s", error)
            time.sleep(_PAUSE)
            return
        self.restarts += 1
        _LOG.warning("the engine is ready again")

    def _failed(self, message: str, error: Exception) -> None:
        """Keep the reason for requests, and log it: ranks that end are expected, other errors have their traceback."""
        self.failure = str(error).splitlines()[0] if str(error) else type(error).__name__
        _LOG.error(message, error, exc_info=None if isinstance(error, RunError) else error)
