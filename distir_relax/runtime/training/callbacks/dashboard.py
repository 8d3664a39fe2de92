"""Dashboard of a training run on a terminal: progress, loss curve, and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING

from distir_relax.runtime.training.callbacks.callback import RunInfo, StepResult
from distir_relax.runtime.training.callbacks.loss_chart import History, line_chart
from distir_relax.support import units
from distir_relax.support.learning_rate import is_of_kind

if TYPE_CHECKING:
    from rich.console import RenderableType

_DECAY = 0.9
"""Decay of the moving averages of step times, work, and communication."""
_HEIGHT = 7
"""Lines of the loss curve."""
_WIDTH = 100
"""Maximum width in characters."""
_LABEL = 9
"""Width of the labels of the loss curve."""


class Dashboard:
    """Measurements of a run so far, and their display."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run
        self.checkpoint = ""
        self.evaluation = ""
        self._losses = History()
        self._last = StepResult(run.step, float("nan"), 0.0, run.work)
        self._seconds, self._work, self._communication = 0.0, float(run.work), 0.0

    def add(self, result: StepResult) -> None:
        """Add a finished step."""
        self._last = result
        self._losses.add(result.loss)
        if self._seconds == 0.0:
            # The first step is slower than any other.
            self._seconds, self._communication = result.seconds, result.communication_seconds
            return
        self._seconds = _averaged(self._seconds, result.seconds)
        self._work = _averaged(self._work, result.work)
        self._communication = _averaged(self._communication, result.communication_seconds)

    def evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation."""
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.evaluation = f"{shown} (step {step})"

    @property
    def speed(self) -> str:
        """Samples or tokens per second: ``1,234 tokens/s``."""
        rate = self._work / max(self._seconds, 1e-9)
        return f"{f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} {self.run.unit}/s"

    @property
    def remaining(self) -> str:
        """Time for the remaining steps: ``0:12:05``."""
        minutes, seconds = divmod(round((self.run.options.steps - self._last.step) * self._seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"

    def render(self, width: int) -> RenderableType:
        """Return the dashboard, at most `width` characters wide."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = max(40, min(width, _WIDTH))
        steps, step = self.run.options.steps, self._last.step
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        left = f"{self.remaining} left" if self._seconds else ""
        head.add_row(f"step {step:,}/{steps:,}", ProgressBar(total=steps, completed=step), left)
        lines = [*self._curve(width - 4), *self._measurements(width - 4)]
        body: list[RenderableType] = [head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)]
        manifest = self.run.manifest
        title = f"{manifest.name}, {units.count(manifest.mesh.size, 'rank')}"
        return Panel(Group(*body), title=title, title_align="left", width=width)

    def _curve(self, width: int) -> list[str]:
        """Return the lines of the loss curve, with its range of values at the left."""
        width -= _LABEL + 2
        means = self._losses.means(2 * width)
        if not means:
            return []
        labels = [f"{max(means):.4g}", *[""] * (_HEIGHT - 2), f"{min(means):.4g}"]
        labels[_HEIGHT // 2] = "loss"
        lines = line_chart(means, width, _HEIGHT)
        return [f"{label:>{_LABEL}} │{line}" for label, line in zip(labels, lines, strict=True)]

    def _measurements(self, width: int) -> list[str]:
        """Return lines with the names and values of measurements, two in a line if there is room."""
        last, cells = self._last, []
        if self._seconds:
            share = min(self._communication / self._seconds, 1)
            cells = [
                ("loss", f"{last.loss:.4g}"),
                ("learning rate", ", ".join(f"{rate:.3g}" for name, rate in last.rates.items() if is_of_kind(name))),
                ("throughput", self.speed),
                ("step time", units.seconds(self._seconds)),
                ("communication", f"{share:.0%}"),
                ("peak memory", units.size(last.peak_memory)),
            ]
            if last.gradient_norm is not None:
                cells.append(("gradient norm", f"{last.gradient_norm:.4g}"))
        texts = [f"{name:13} {value}" for name, value in cells]
        if width >= 70:
            pairs = zip_longest(texts[::2], texts[1::2], fillvalue="")
            texts = [f"{left:{width // 2}}{right}".rstrip() for left, right in pairs]
        notes = {"evaluation": self.evaluation, "checkpoint": self.checkpoint}
        return texts + [f"{name:13} {note}" for name, note in notes.items() if note]


def _averaged(average: float, value: float) -> float:
    return average * _DECAY + value * (1 - _DECAY)
