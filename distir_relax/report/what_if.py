"""Comparison of simulations of one program on a machine and on the same machine with scaled figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from distir_relax.compiler.simulate_generation import GenerationSimulation
from distir_relax.report.text_table import align_columns
from distir_relax.simulation.simulation import Simulation
from distir_relax.support.units import rate, seconds, size

_HEAD = ("", "before", "after", "ratio")


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure on the machine as it is, and on the scaled one."""

    name: str
    before: float
    after: float
    to_text: Callable[[float], str]

    @property
    def ratio(self) -> float | None:
        """The second figure relative to the first; None if that is 0."""
        return self.after / self.before if self.before else None


def compare(before: Simulation, after: Simulation) -> list[Compared]:
    """Return the figures of both: times of a step, shares of the devices' time, memory."""
    rows = [Compared("a step", before.makespan, after.makespan, seconds)]
    if before.throughput is not None and after.throughput is not None:
        rows.append(Compared("samples", before.throughput, after.throughput, rate))
    rows += [
        Compared(name, float(first.mean()), float(second.mean()), seconds)
        for name, first, second in (
            ("compute", before.compute, after.compute),
            ("communication", before.communicate, after.communicate),
            ("idle", before.idle, after.idle),
            ("streams", before.overlapped, after.overlapped),
        )
        if first.any() or second.any()
    ]
    rows.append(Compared("memory peak", float(before.peak_memory.max()), float(after.peak_memory.max()), size))
    return [*rows, Compared("memory", float(before.memory.min()), float(after.memory.min()), size)]


def compare_generation(before: GenerationSimulation, after: GenerationSimulation) -> list[Compared]:
    """Return the figures of both: times to tokens, throughput, memory of a device."""

    def mean(times: Sequence[float] | None) -> float:
        return sum(times) / len(times) if times else 0.0

    rows = [
        Compared("all requests", before.seconds, after.seconds, seconds),
        Compared("first token", mean(before.first_token), mean(after.first_token), seconds),
        Compared("each token", mean(before.per_token), mean(after.per_token), seconds),
        Compared("tokens", before.throughput, after.throughput, rate),
        Compared("memory", min(before.memory), min(after.memory), size),
    ]
    return [row for row in rows if row.before or row.after]


def what_if_text(scale: str, rows: Sequence[Compared]) -> str:
    """Return a table of the figures before and after scaling."""
    return "\n".join([f"what if {scale}", *align_columns([_HEAD, *map(_cells, rows)])])


def what_if_json(scale: str, before: dict[str, Any], rows: Sequence[Compared]) -> dict[str, Any]:
    """Return the change, the result on the machine as it is, and the ratios by name."""
    return {"scale": scale, "before": before, "ratios": {row.name: row.ratio for row in rows}}


def what_if_section(simulation: Simulation) -> str:
    """Return the section of the report page; empty for a simulation of a machine as it is."""
    if simulation.before is None or simulation.scale is None:
        return ""
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>"
        for row in compare(simulation.before, simulation)
    )
    head = "".join(f"<th>{title}</th>" for title in _HEAD)
    return (
        f'<section>\n<h2>What if</h2>\n<p class="note">{escape(simulation.scale)}: this page is of the scaled machine, '
        f'with the same program.</p>\n<div class="scrolls"><table class="narrow"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>\n</section>"
    )


def _cells(row: Compared) -> tuple[str, str, str, str]:
    before, after = (row.to_text(value) if value else "0" for value in (row.before, row.after))
    return row.name, before, after, "" if row.ratio is None else f"{row.ratio:.3f}x"
