"""The paper's figures 5, 6, 7 and 10, and throughput by batch, drawn from what was found, on light and dark ground."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from distir_relax.strategy_search import Outcome

from .comparison import Measured
from .searches import PURE, Found

KINDS = ("mostly data", "mostly tensor", "mostly pipeline")
FIXED = {"MLP 1B": 65536, "MLP 17B": 32768, "MLP 103B": 1024}
"""The batches of figure 5 here; the paper's text does not say its own."""
THEIR_RATE = 12767
"""Device-ops a second of the paper's public code, building the program included (the README says how measured)."""


@dataclass(frozen=True)
class Scheme:
    """The colours of a page on light or dark ground; those of `kinds` are told apart by colour-blind people, too."""

    suffix: str
    ground: str
    text: str
    soft: str
    line: str
    bad: str
    kinds: tuple[str, str, str]


LIGHT = Scheme("", "#ffffff", "#1b1f23", "#59636e", "#d5d9dd", "#b3261e", ("#0072b2", "#009e73", "#e69f00"))
DARK = Scheme("-dark", "#14171a", "#e6e9ec", "#a3adb6", "#3a4249", "#ff8a80", ("#56b4e9", "#009e73", "#e69f00"))


@dataclass(frozen=True)
class Picture:
    """One figure: the file's `name`, what it shows, and how it is drawn."""

    name: str
    title: str
    draw: Callable[[Scheme], Figure]

    def write(self, folder: Path) -> None:
        """Write ``NAME.png`` and ``NAME-dark.png``."""
        for scheme in (LIGHT, DARK):
            figure = self.draw(scheme)
            figure.savefig(folder / f"{self.name}{scheme.suffix}.png", facecolor=scheme.ground)


def pictures(found: Sequence[Found], measured: Sequence[Measured]) -> list[Picture]:
    """All that can be drawn of these searches and measurements, in the order of the paper."""
    drawn = []
    for one in found:
        slug = one.model.lower().replace(" ", "-")
        figure, batch = (5, FIXED[one.model]) if one.model in FIXED else (6, None)
        which = f"batch {batch:,}" if batch in one.grid.batches else "all batches"
        batch = batch if batch in one.grid.batches else None
        title = f"{one.model}, {which}: memory of a device against throughput (figure {figure})"
        drawn.append(Picture(f"memory-{slug}", title, lambda s, one=one, batch=batch: memory(one, batch, s)))
        title = f"{one.model}: throughput by batch"
        drawn.append(Picture(f"throughput-{slug}", title, lambda s, one=one: throughput(one, s)))
    timed = [one for one in found if one.timed]
    if timed:
        title = "Time to compile and simulate one configuration (figure 7)"
        drawn.append(Picture("simulation-time", title, lambda s: simulation_time(timed, s)))
    if measured:
        title = f"Simulated against measured throughput, {len(measured)} measurements of MLP 1B (figure 10)"
        drawn.append(Picture("measured", title, lambda s: accuracy(measured, s)))
    return drawn


def memory(found: Found, batch: int | None, scheme: Scheme) -> Figure:
    """Memory of the device that needs most (GB) against samples a second: a point for each configuration of a batch, or
    of all. What is not filled does not fit."""
    figure, axes = _figure(scheme, "memory of a device (GB)", "samples a second")
    shown = [o for o in found.search.outcomes if o.seconds and batch in (None, o.samples)]
    for kind, (name, colour) in enumerate(zip(KINDS, scheme.kinds, strict=True)):
        for fits in (True, False):
            mine = [o for o in shown if o.fits == fits and _kind(o) == kind]
            face = colour if fits else "none"
            axes.scatter(
                [o.memory / 1e9 for o in mine], [o.throughput for o in mine],
                s=11, facecolors=face, edgecolors=colour, linewidths=0.7, label=name if fits else None,
            )  # fmt: skip
    axes.axvline(found.search.profile.memory / 1e9, color=scheme.bad, linestyle="--", linewidth=1)
    fitting = [o for o in found.search.ranked if batch in (None, o.samples)]
    if fitting:
        _name_best(axes, fitting[0], scheme)
    _finish(axes, scheme)
    return figure


def throughput(found: Found, scheme: Scheme) -> Figure:
    """Samples a second by batch: the best that fits, and pure data, tensor and pipeline parallelism."""
    figure, axes = _figure(scheme, "samples in a batch", "samples a second")
    best = found.search.best_by_batch()
    axes.plot(list(best), [o.throughput for o in best.values()], color=scheme.text, marker="o", ms=4, label="best")
    for (name, strategy), colour in zip(PURE.items(), scheme.kinds, strict=True):
        mine = [o for batch in found.grid.batches if (o := found.outcome(strategy, batch)) is not None]
        axes.plot([o.samples for o in mine], [o.throughput for o in mine], color=colour, lw=1, ms=3, marker="s",
                  label=f"{name}, {strategy}")  # fmt: skip
    _finish(axes, scheme)
    return figure


def simulation_time(found: Sequence[Found], scheme: Scheme) -> Figure:
    """Seconds to compile and simulate a configuration by its ops, one on one device each; a line for their code."""
    figure, axes = _figure(scheme, "ops of the program, on all devices", "seconds")
    markers = "osD^vP"
    for number, one in enumerate(found):
        colour = scheme.kinds[number % len(scheme.kinds)]
        axes.scatter([t.device_ops for t in one.timed], [t.seconds for t in one.timed], s=12, color=colour,
                     marker=markers[number % len(markers)], label=one.model)  # fmt: skip
    ops = [t.device_ops for one in found for t in one.timed]
    ends = [min(ops), max(ops)]
    axes.plot(
        ends,
        [n / THEIR_RATE for n in ends],
        color=scheme.soft,
        lw=1,
        ls="--",
        label=f"the paper's code, {THEIR_RATE:,}/s",
    )
    _finish(axes, scheme)
    return figure


def accuracy(measured: Sequence[Measured], scheme: Scheme) -> Figure:
    """Predicted samples a second against measured ones; the line is where they agree."""
    figure, axes = _figure(scheme, "measured samples a second", "predicted samples a second")
    for (name, strategy), colour in zip(PURE.items(), scheme.kinds, strict=True):
        mine = [m for m in measured if m.strategy == strategy]
        axes.scatter([m.measured for m in mine], [m.predicted for m in mine], s=16, color=colour,
                     label=f"{name}, {strategy}")  # fmt: skip
    values = [v for m in measured for v in (m.measured, m.predicted)]
    ends = [min(values) / 1.3, max(values) * 1.3]
    axes.plot(ends, ends, color=scheme.soft, lw=1)
    _finish(axes, scheme)
    return figure


def _figure(scheme: Scheme, x: str, y: str) -> tuple[Figure, Axes]:
    # Small and dense, so that letters can still be read where a phone shows it as wide as its screen.
    figure = Figure(figsize=(4.6, 3.6), dpi=180, layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    axes.set_facecolor(scheme.ground)
    axes.set_xlabel(x, color=scheme.text)
    axes.set_ylabel(y, color=scheme.text)
    axes.grid(True, color=scheme.line, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=scheme.soft)
    for spine in axes.spines.values():
        spine.set_color(scheme.line)
    return figure, axes


def _finish(axes: Axes, scheme: Scheme) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 60 * low else (1.0,)))
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(NullFormatter())
    legend = axes.legend(fontsize=8, framealpha=0.8, facecolor=scheme.ground, edgecolor=scheme.line)
    for text in legend.get_texts():
        text.set_color(scheme.text)


def _name_best(axes: Axes, best: Outcome, scheme: Scheme) -> None:
    place = best.memory / 1e9, best.throughput
    axes.scatter(*place, s=60, facecolors="none", edgecolors=scheme.text, linewidths=1.2)
    left = best.memory > 4e9
    axes.annotate(
        best.strategy, place, xytext=(-7 if left else 7, 5), textcoords="offset points", fontsize=8, color=scheme.text,
        ha="right" if left else "left",
    )  # fmt: skip


def _kind(outcome: Outcome) -> int:
    """Which of the three degrees is the largest, the first of equal ones."""
    s = outcome.candidate.strategy
    degrees = (s.data, s.tensor, s.pipeline)
    return degrees.index(max(degrees))
