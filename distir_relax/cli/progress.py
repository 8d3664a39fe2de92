"""Progress display of long-running commands."""

from __future__ import annotations

import threading
import time
from typing import Any

from distir_relax.compiler.pass_manager import Observer
from distir_relax.compiler.pass_text import print_pass
from distir_relax.ir import Module, Pass
from distir_relax.support.units import size

PATIENCE = 1.0
"""Seconds before anything is shown."""


class Progress(Observer):
    """Show the running pass on a `rich` console after one second: ``with Progress(console, "first") as progress``.

    On a terminal this is a status line that is removed at the end, elsewhere one line for each pass that runs for more
    than a second, and lines about the weights that were written `line_seconds` apart.
    """

    def __init__(self, console: Any, first: str, patience: float = PATIENCE, line_seconds: float = 30.0) -> None:
        self._console = console
        self._first = first
        self._status = console.status("") if console.is_terminal else None
        self._patience = patience
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._text = ""
        self._late = False
        self._bar: Any = None
        self._line_seconds = line_seconds
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> Progress:
        self._enter(self._first)
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        if self._bar is not None:
            self._bar.stop()

    def begin(self, number: int, step: Pass) -> None:
        """Show the pass that starts."""
        self._enter(print_pass(step))

    def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
        """After the last pass of a pipeline, show that programs are written."""
        if module.stage == "ranked":
            self._began = time.monotonic()
            self._enter("writing programs and weights")

    def written(self, done: int, total: int) -> None:
        """Show how many bytes of weights were written, of a total: on a terminal by a bar, elsewhere by rare lines."""
        now = time.monotonic()
        if self._status is None:
            if now - self._printed > self._line_seconds:
                self._printed = now
                left = (now - self._began) * (total - done) / max(done, 1)
                text = f"wrote {size(done)} of {size(total)} of weights, {left:.0f} s left"
                self._console.print(text, markup=False, highlight=False)
            return
        if now - self._began < self._patience:
            return
        if self._bar is None:
            self._leave()
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            columns = TextColumn("writing weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
            self._bar = Bars(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

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
