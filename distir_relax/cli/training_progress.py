"""Progress of a training run: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TextIO

import typer

from distir_relax.runtime.training.training_loop import Done, TrainOptions

LINES = 20
"""Number of lines printed without a terminal, unless steps are slow."""
PATIENCE = 30.0
"""Maximum seconds between two lines."""
_DECAY = 0.9
"""Decay of the moving averages of step times, and of their work."""


class TrainingProgress:
    """A `Listener` that shows step, loss, samples or tokens per second, and the remaining time.

    It writes step, loss and seconds of each step to the file `log`; a resumed run appends to it.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._lines: TextIO | None = None
        self._bar: Any = None
        self._task: Any = None
        self._steps, self._unit = 0, ""
        self._average, self._work = 0.0, 0.0
        self._last_line = 0.0

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar from the terminal, and close the log."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def begun(self, step: int, options: TrainOptions, per_step: int, unit: str) -> None:
        """See `Listener`."""
        self._steps, self._work, self._unit = options.steps, per_step, unit
        self._last_line = time.perf_counter()
        if self._log is not None:
            resumes = step > 0 and self._log.exists()
            self._lines = self._log.open("a" if resumes else "w", encoding="utf-8", buffering=1)
            self._lines.write("" if resumes else "step,loss,seconds\n")
        if step:
            typer.echo(f"resumed from step {step}")
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:
            self._show(console, step)

    def done(self, done: Done) -> None:
        """See `Listener`."""
        if self._lines is not None:
            self._lines.write(f"{done.step},{done.loss!r},{done.seconds:.6f}\n")
        # The first step is slower than any other.
        self._average = self._average * _DECAY + done.seconds * (1 - _DECAY) if self._average else done.seconds
        self._work = self._work * _DECAY + done.work * (1 - _DECAY)
        if self._bar is not None:
            self._bar.update(self._task, completed=done.step, loss=f"{done.loss:.4g}", speed=self._speed())
            return
        now = time.perf_counter()
        if done.step % max(1, self._steps // LINES) and done.step < self._steps and now - self._last_line < PATIENCE:
            return
        self._last_line = now
        left = (self._steps - done.step) * self._average
        typer.echo(f"step {done.step}/{self._steps}  loss {done.loss:.6g}  {self._speed()}  {_time(left)} left")

    def saved(self, path: Path, step: int) -> None:
        """See `Listener`."""
        if self._bar is None:
            typer.echo(f"wrote {path}")

    def _speed(self) -> str:
        rate = self._work / max(self._average, 1e-9)
        return f"{f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} {self._unit}/s"

    def _show(self, console: Any, step: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = ("step", MofNCompleteColumn(), BarColumn(), "loss {task.fields[loss]}", "{task.fields[speed]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console, transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=self._steps, completed=step, loss="", speed="")


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
