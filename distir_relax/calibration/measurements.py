"""Measurements of a calibration as lists of times; passes taken at different moments are merged before the fit.

A shared machine varies in speed, and interference only slows it down: see
`distir_relax.calibration.statistics.undisturbed`.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distir_relax.calibration.budget import Budget
from distir_relax.calibration.measure import CollectiveSample, time_collectives, time_ops
from distir_relax.calibration.microbenchmarks import dtypes_of, op_samples, scale_of
from distir_relax.calibration.programs import time_programs
from distir_relax.calibration.statistics import undisturbed
from distir_relax.kernels.processor import processor_field
from distir_relax.runtime.world import World

# The shares of a collective and of a program in the time of a pass, relative to an op; and the approximate number of
# collectives.
_COLLECTIVE, _PROGRAM, _COLLECTIVES = 3, 10, 50

Times = list[list[float]]
"""Several times, in seconds, of each item."""


@dataclass(frozen=True)
class Machine:
    """Properties of a machine: its name, and the bytes of a device's memory and last-level cache."""

    name: str
    torch: str
    memory: float
    cache: float


@dataclass(frozen=True)
class Measurements:
    """Times of ops, of programs (by dtype, in the order of `op_samples` and `programs`) and of collectives.

    `alone` are the ops of `cold_samples`, on one rank while the others wait. `scale` is the factor of larger sizes.
    """

    ranks: int
    device: str
    scale: int
    machine: Machine
    ops: Mapping[str, Times]
    programs: Mapping[str, Times]
    alone: Times
    collectives: Sequence[CollectiveSample]
    collective_times: Times

    def plain(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Measurements:
        """Restore the measurements from `plain`."""
        fields = dict(plain)
        fields["machine"] = Machine(**plain["machine"])
        fields["collectives"] = [CollectiveSample(**row) for row in plain["collectives"]]
        return cls(**fields)

    def bandwidth_ratio(self) -> float:
        """Return how much faster a device reads weights from memory while the others are idle."""
        if not self.alone:
            return 1.0
        concurrent = [self.ops["float32"][i] for i in cold_samples(self.scale)]
        return max(1.0, median(undisturbed(a) / undisturbed(b) for a, b in zip(concurrent, self.alone, strict=True)))


def measure_pass(device: str, programs: Path, world: World | None, budget: Budget | None = None) -> Measurements:
    """Measure everything once, as one rank of a launch or alone. All ranks call this together; rank 0 has the result.

    `programs` is a folder that `write_programs` filled. A measurement takes at most its share of the `budget`.
    """
    scale, dtypes = scale_of(device), dtypes_of(device)
    cold = cold_samples(scale)
    unit = math.inf
    if budget is not None:
        count = len(cold) + len(dtypes) * len(op_samples("float32", scale)) + _COLLECTIVE * _COLLECTIVES
        unit = budget.share(count + _PROGRAM * len([*programs.glob("*.dist")]))
    alone: Times = []
    launch = world if world is not None and world.size > 1 else None
    if launch:
        if launch.rank == 0:
            samples = op_samples("float32", scale)
            alone = time_ops([samples[i] for i in cold], device, None, unit)
        launch.exchange(0)
    collectives = time_collectives(launch, device, scale, _COLLECTIVE * unit) if launch else []
    return Measurements(
        ranks=world.size if world else 1,
        device=device,
        scale=scale,
        machine=device_machine(device),
        ops={d: _over_ranks(time_ops(op_samples(d, scale), device, world, unit), world) for d in dtypes},
        programs={dtypes[0]: time_programs(programs, dtypes[0], device, world, _PROGRAM * unit)},
        alone=alone,
        collectives=[kind for kind, _ in collectives],
        collective_times=[times for _, times in collectives],
    )


def merge_passes(passes: Sequence[Measurements]) -> Measurements:
    """Merge passes on one machine."""

    def merge(parts: Sequence[Times]) -> Times:
        return [[t for times in row for t in times] for row in zip(*parts, strict=True)]

    first = passes[0]
    return Measurements(
        ranks=first.ranks,
        device=first.device,
        scale=first.scale,
        machine=first.machine,
        ops={dtype: merge([p.ops[dtype] for p in passes]) for dtype in first.ops},
        programs={dtype: merge([p.programs[dtype] for p in passes]) for dtype in first.programs},
        alone=merge([p.alone for p in passes]),
        collectives=first.collectives,
        collective_times=merge([p.collective_times for p in passes]),
    )


def cold_samples(scale: int) -> list[int]:
    """Return the indices of the ops whose weights are read from memory."""
    return [i for i, sample in enumerate(op_samples("float32", scale)) if sample.cold]


def _over_ranks(times: Times, world: World | None) -> Times:
    """Return the median over ranks of each time; ranks measure at the same moment."""
    if world is None or world.size == 1:
        return times
    return [[median(at) for at in zip(*column, strict=True)] for column in zip(*world.exchange(times), strict=True)]


def device_machine(device: str) -> Machine:
    """Return the properties of this machine, or of its first GPU."""
    import torch

    if device == "cpu":
        return Machine(_processor(), torch.__version__, _host_memory(), _host_cache())
    card = torch.cuda.get_device_properties(0)
    return Machine(card.name, torch.__version__, card.total_memory, card.L2_cache_size)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_cache() -> int:
    """Return the bytes of the last-level cache; 32 MB if the system does not report it."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        digits = file.read_text().strip().rstrip("K")
        if digits.isdigit():
            sizes.append(1024 * int(digits))
    return max(sizes, default=32 << 20)


def _processor() -> str:
    return processor_field("model name") or platform.processor() or platform.machine()
