"""Published times of collectives: `rows.csv`, one measurement a row."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distir_relax.cost.network import collective_seconds
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.cost.scaling import scale_profile

CSV = Path(__file__).with_name("rows.csv")

SOURCES = {
    "dgxc-8-h100": "github.com/NVIDIA/dgxc-benchmarking, commit 46e4201, nccl/README.md: nccl-tests, a node of 8 H100",
    "ml-engineering-sharp": (
        "github.com/stas00/ml-engineering, network/README.md, section SHARP: nccl-tests on a node of 8 H200, with "
        "NVLink SHARP and without"
    ),
    "ml-engineering-4-nodes": (
        "the same repository, its list of open tasks, August 2026: 4 nodes of 8 H200, 16 NICs of 200 Gbit/s each, "
        "NCCL's ring"
    ),
    "nccl-tests-152": (
        "github.com/NVIDIA/nccl-tests, issue 152, July 17, 2023: 2 nodes of 8 A100 80GB with 4 NICs of 200 Gbit/s each"
    ),
    "nccl-527": (
        "github.com/NVIDIA/nccl, issue 527, July 25, 2022: 1 to 4 nodes of 8 A100 (p4dn.24xlarge) with 4 NICs of "
        "100 Gbit/s each"
    ),
    "nccl-1218": "github.com/NVIDIA/nccl, issue 1218: 32 nodes of 8 H100 with 8 NICs each",
}
"""Place of each source."""


@dataclass(frozen=True)
class Row:
    """A measured collective.

    `profile` is the machine's, changed by `scale` where its network differs: NICs at 90 % of their line rate, as in the
    profiles. `bytes` are those of nccl-tests: of the result for an all-gather, of a buffer otherwise. `measured` is in
    microseconds (``us``) or the bus bandwidth in GB/s (``busbw``).
    """

    source: str
    profile: str
    scale: str
    collective: str
    ranks: int
    bytes: int
    measured: float
    unit: str
    note: str

    @property
    def machine(self) -> Profile:
        """The machine that the row is predicted for."""
        profile = load_profile(self.profile)
        return scale_profile(profile, self.scale) if self.scale else profile

    @property
    def seconds(self) -> float:
        """The measured seconds."""
        if self.unit == "us":
            return self.measured * 1e-6
        factor = (self.ranks - 1) / self.ranks * (2 if self.collective == "all_reduce" else 1)
        return self.bytes * factor / self.measured * 1e-9

    @property
    def predicted(self) -> float:
        """The predicted seconds."""
        size = self.bytes / self.ranks if self.collective == "all_gather" else float(self.bytes)
        return collective_seconds(self.machine, self.collective, range(self.ranks), [size] * self.ranks)

    @property
    def error(self) -> float:
        """The relative error of the predicted seconds."""
        return self.predicted / self.seconds - 1


def read_rows() -> Iterator[Row]:
    """Yield the rows of the file."""
    with CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            numbers = {"ranks": int(row["ranks"]), "bytes": int(row["bytes"]), "measured": float(row["measured"])}
            yield Row(**{**row, **numbers})
