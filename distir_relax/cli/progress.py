"""Progress display of long-running commands."""

from __future__ import annotations

import threading
from typing import Any

from distir_relax.compiler.pass_manager import Observer
from distir_relax.compiler.pass_text import print_pass
from distir_relax.ir import Module, Pass

PATIENCE = 1.0
"""Seconds before anything is shown."""


class Progress(Observer):
    """Show the running pass on a `rich` console after one second: ``with Progress(console, "first") as progress``.

    On a terminal this is a status line that is removed at the end, elsewhere one line for each pass that runs for more
    than a second.
    """

    def __init__(self, console: Any, first: str, patience: float = PATIENCE) -> None:
        self._console = console
        self._first = first
        self._status = console.status("") if console.is_terminal else None
        self._patience = patience
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._text = ""
        self._late = False

    def __enter__(self) -> Progress:
        self._enter(self._first)
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def begin(self, number: int, step: Pass) -> None:
        """Show the pass that starts."""
        self._enter(print_pass(step))

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """After the last pass of a pipeline, show that programs are written."""
        if module.stage == "ranked":
            self._enter("writing programs and weights")

    def _enter(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._late and self._status is not None:
                self._status.update(text)
            elif self._status is None or self._timer is None:
                self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._patience, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            self._late = True
            if self._status is None:
                self._console.print(f"{self._text} ...", markup=False, highlight=False)
            else:
                self._status.update(self._text)
                self._status.start()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._status is not None:
                self._status.stop()
