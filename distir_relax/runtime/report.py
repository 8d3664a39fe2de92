"""Run reports: time per step, bytes communicated and weight bytes of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distir_relax.bundle import Manifest, local_bytes
from distir_relax.runtime.progress import Traffic

TaskTime = tuple[str, float, float]
"""A task of a pipeline, such as ``1F0``, with its begin and end."""


@dataclass(frozen=True)
class RankReport:
    """Report of one rank: the bytes of its weight shards, and the traffic of one step, by kind of communication."""

    rank: int
    program: str
    weight_bytes: int
    sent_bytes: dict[str, int]
    calls: dict[str, int]


@dataclass(frozen=True)
class RunReport:
    """Report of all ranks. A step is one call of the program; `step_seconds` is the median of the slowest rank's times.

    Bytes are counted as in `Traffic`, for one step. `tasks` are each rank's pipeline tasks of the last step, with
    their begin and end in seconds from the start of the step.
    """

    name: str
    backend: str
    transport: str
    steps: int
    step_seconds: float
    ranks: tuple[RankReport, ...]
    tasks: tuple[tuple[TaskTime, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists."""
        return {
            "name": self.name,
            "backend": self.backend,
            "transport": self.transport,
            "world_size": len(self.ranks),
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "ranks": [
                {
                    "rank": rank.rank,
                    "program": rank.program,
                    "weight_bytes": rank.weight_bytes,
                    "sent_bytes": sum(rank.sent_bytes.values()),
                    "by_kind": {
                        kind: {"calls": rank.calls[kind], "sent_bytes": sent} for kind, sent in rank.sent_bytes.items()
                    },
                }
                for rank in self.ranks
            ],
        }


def make_report(
    manifest: Manifest,
    backend: str,
    transport: str,
    seconds: Sequence[float],
    traffic: Sequence[Traffic],
    tasks: Sequence[Sequence[TaskTime]] = (),
) -> RunReport:
    """Build a report from `seconds` per step (of the slowest rank), and `traffic` and `tasks` of one step per rank."""
    ranks = tuple(
        RankReport(
            rank,
            manifest.program_of(rank).name,
            sum(local_bytes(tensor, manifest.mesh, rank) for tensor in manifest.weights),
            dict(sent.bytes),
            dict(sent.calls),
        )
        for rank, sent in enumerate(traffic)
    )
    rows = tuple(tuple((name, begin, end) for name, begin, end in row) for row in tasks)
    return RunReport(manifest.name, backend, transport, len(seconds), median(seconds), ranks, rows)
