"""Progress of a training run: a dashboard on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.runtime.training.callbacks.callback import Callback, RunInfo, StepResult
from distir_relax.runtime.training.callbacks.dashboard import Dashboard

if TYPE_CHECKING:
    from rich.console import Console

LINES = 20
"""Number of lines printed without a terminal, unless steps are slow."""
PATIENCE = 30.0
"""Maximum seconds between two lines."""


class Progress(Callback):
    """Show a run's step, loss, samples or tokens per second, and remaining time.

    On a terminal it is a dashboard with the loss curve, learning rate, share of communication, peak memory, and the
    last evaluation and checkpoint, which is removed at the end; elsewhere some lines on the standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._live: Any = None
        self._dashboard: Dashboard | None = None
        self._last_line = 0.0

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        from rich.console import Console

        dashboard = self._dashboard = Dashboard(run)
        self._last_line = time.perf_counter()
        if run.step:
            print(f"resumed from step {run.step}", flush=True)
        console = self._console or Console(stderr=True)
        if console.is_terminal:
            from rich.live import Live

            draw = lambda: dashboard.render(console.width)  # noqa: E731
            self._live = Live(get_renderable=draw, console=console, refresh_per_second=4, transient=True)
            self._live.start()

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        assert self._dashboard is not None, "the run has begun"
        self._dashboard.add(result)
        if self._live is not None:
            return
        now, steps = time.perf_counter(), self._dashboard.run.options.steps
        if result.step % max(1, steps // LINES) and result.step < steps and now - self._last_line < PATIENCE:
            return
        self._last_line = now
        speed, remaining = self._dashboard.speed, self._dashboard.remaining
        print(f"step {result.step}/{steps}  loss {result.loss:.6g}  {speed}  {remaining} left", flush=True)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        assert self._dashboard is not None, "the run has begun"
        self._dashboard.evaluate(step, metrics)
        if self._live is None:
            print(f"evaluation {self._dashboard.evaluation}", flush=True)

    def saved(self, path: Path, step: int) -> None:
        """See `Callback`."""
        assert self._dashboard is not None, "the run has begun"
        self._dashboard.checkpoint = str(path)
        if self._live is None:
            print(f"wrote {path}", flush=True)

    def close(self) -> None:
        """See `Callback`."""
        if self._live is not None:
            self._live.stop()
            self._live = None
