"""What a calibration measures, as lists of times: passes taken at different moments are joined before they are fitted.

A machine that is shared is not equally fast at all times, and only ever slower than it can be: see
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
from distir_relax.runtime.world import World

# The shares of a collective and of a program in the time of a pass, where that of an op is 1; and how many collectives
# there are, about.
_COLLECTIVE, _PROGRAM, _COLLECTIVES = 3, 10, 50

Times = list[list[float]]
"""Several times, in seconds, of each of several things."""


@dataclass(frozen=True)
class Machine:
    """What is read off a machine: bytes of a device's memory and of its last cache, and what it is called."""

    name: str
    torch: str
    memory: float
    cache: float


@dataclass(frozen=True)
class Measurements:
    """Times of ops, of programs (by dtype, in the order of `op_samples` and `programs`) and of collectives.

    `alone` are the ops of `cold_samples`, on one rank while the others wait. `scale` is what multiplied the larger
    sizes.
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
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Measurements:
        """What `plain` gave."""
        found = dict(plain)
        found["machine"] = Machine(**plain["machine"])
        found["collectives"] = [CollectiveSample(**row) for row in plain["collectives"]]
        return cls(**found)

    def bandwidth_ratio(self) -> float:
        """How much faster a device reads weights from memory while the others do nothing."""
        if not self.alone:
            return 1.0
        together = [self.ops["float32"][i] for i in cold_samples(self.scale)]
        return max(1.0, median(undisturbed(a) / undisturbed(b) for a, b in zip(together, self.alone, strict=True)))


def take(device: str, programs: Path, world: World | None, budget: Budget | None = None) -> Measurements:
    """One pass over everything, as one rank of a launch or alone. Every rank calls this; rank 0 has what counts.

    `programs` is a folder that `write_programs` filled. A measurement takes no more than its share of the `budget`.
    """
    scale, dtypes = scale_of(device), dtypes_of(device)
    cold = cold_samples(scale)
    unit = math.inf
    if budget is not None:
        count = len(cold) + len(dtypes) * len(op_samples("float32", scale)) + _COLLECTIVE * _COLLECTIVES
        unit = budget.share(count + _PROGRAM * len([*programs.glob("*.dist")]))
    alone: Times = []
    several = world if world is not None and world.size > 1 else None
    if several:
        if several.rank == 0:
            samples = op_samples("float32", scale)
            alone = time_ops([samples[i] for i in cold], device, None, unit)
        several.exchange(0)
    collectives = time_collectives(several, device, scale, _COLLECTIVE * unit) if several else []
    return Measurements(
        ranks=world.size if world else 1,
        device=device,
        scale=scale,
        machine=_machine(device),
        ops={d: _over_ranks(time_ops(op_samples(d, scale), device, world, unit), world) for d in dtypes},
        programs={d: time_programs(programs, d, device, world, _PROGRAM * unit) for d in dtypes},
        alone=alone,
        collectives=[kind for kind, _ in collectives],
        collective_times=[times for _, times in collectives],
    )


def joined(passes: Sequence[Measurements]) -> Measurements:
    """All passes of one machine as one."""

    def together(parts: Sequence[Times]) -> Times:
        return [[t for times in row for t in times] for row in zip(*parts, strict=True)]

    first = passes[0]
    return Measurements(
        ranks=first.ranks,
        device=first.device,
        scale=first.scale,
        machine=first.machine,
        ops={dtype: together([p.ops[dtype] for p in passes]) for dtype in first.ops},
        programs={dtype: together([p.programs[dtype] for p in passes]) for dtype in first.programs},
        alone=together([p.alone for p in passes]),
        collectives=first.collectives,
        collective_times=together([p.collective_times for p in passes]),
    )


def cold_samples(scale: int) -> list[int]:
    """The numbers of the ops whose weights come from memory."""
    return [i for i, sample in enumerate(op_samples("float32", scale)) if sample.cold]


def _over_ranks(times: Times, world: World | None) -> Times:
    """The median over ranks of each time: they measured at the same moment."""
    if world is None or world.size == 1:
        return times
    return [[median(at) for at in zip(*column, strict=True)] for column in zip(*world.exchange(times), strict=True)]


def _machine(device: str) -> Machine:
    import torch

    if device == "cpu":
        return Machine(_processor(), torch.__version__, _host_memory(), _host_cache())
    card = torch.cuda.get_device_properties(0)
    return Machine(card.name, torch.__version__, card.total_memory, card.L2_cache_size)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_cache() -> int:
    """The bytes of the last cache that all cores share; 32 MB where the system does not say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        digits = file.read_text().strip().rstrip("K")
        if digits.isdigit():
            sizes.append(1024 * int(digits))
    return max(sizes, default=32 << 20)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
