"""Measurements of a calibration as lists of times; passes taken at different moments are merged before the fit.

A shared machine varies in speed, and interference only slows it down: see
`distir_relax.calibration.statistics.undisturbed`.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

from distir_relax.calibration.budget import Budget
from distir_relax.calibration.measure import CollectiveSample, time_collectives, time_ops, time_ranks, time_reads
from distir_relax.calibration.microbenchmarks import dtypes_of, op_samples, scale_of
from distir_relax.calibration.programs import time_programs
from distir_relax.calibration.statistics import undisturbed
from distir_relax.calibration.step_overhead import time_step_samples
from distir_relax.cost.roofline import cache_of
from distir_relax.kernels.processor import instruction_sets, processor_field, processor_flags
from distir_relax.runtime.world import ALONE, World

# The shares of a collective and of a program in the time of a pass, relative to an op; and the approximate number of
# collectives.
_COLLECTIVE, _PROGRAM, _COLLECTIVES = 3, 10, 58

# A product takes so many times as long, with its weight from memory, if most of its time is reading that.
_MOSTLY_READING = 2.0
# Reads from memory take at least so many times as long as from a cache, or memory was not reached.
_UNCACHED = 1.5

Times = list[list[float]]
"""Several times, in seconds, of each item."""


@dataclass(frozen=True)
class Machine:
    """Properties of a machine: its name, and the bytes of a device's memory and last-level cache.

    Of a CPU, also its `instructions` (`instruction_sets`) and the number of ranks that have `cores` of their own.
    """

    name: str
    torch: str
    memory: float
    cache: float
    instructions: str = ""
    cores: int = 0


@dataclass(frozen=True)
class Measurements:
    """Times of ops, of programs (by dtype, in the order of `op_samples` and `programs`) and of collectives.

    `alone` are the ops of `cold_samples`, on one rank while the others wait. `scale` is the factor of larger sizes.
    `rank_seconds` are times of equal work by rank, at the same moments, and `rank_memory` the bytes of each device.
    `read_times` are the seconds of a byte of weights, of which `read_bytes` are read in turn, on all ranks at once.
    `step_times` are those of `step_samples`, on several ranks of a CPU. `host_of` has for each rank the first rank of
    its host.
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
    rank_seconds: Times = field(default_factory=list)
    rank_memory: Sequence[float] = field(default_factory=list)
    read_bytes: Sequence[float] = field(default_factory=list)
    read_times: Times = field(default_factory=list)
    step_times: Times = field(default_factory=list)
    host_of: Sequence[int] = field(default_factory=list)

    @property
    def hosts(self) -> int:
        """The number of hosts, 0 if all ranks are on one."""
        return len(set(self.host_of)) if len(set(self.host_of)) > 1 else 0

    def share(self, rank: int) -> int:
        """Return the number of ranks that share the memory of a rank's device."""
        if self.device != "cpu":
            return 1
        return self.host_of.count(self.host_of[rank]) if self.hosts else self.ranks

    @property
    def together(self) -> int:
        """The number of ranks on which ops and programs were measured: as many as have cores of their own."""
        return min(self.ranks, self.machine.cores) if self.machine.cores and not self.hosts else self.ranks

    def comparable_rank_seconds(self) -> Times:
        """Return the times of equal work by rank, as `unlike_ranks` compares them.

        On several hosts, each with disturbances of its own, these are the faster half of each rank's.
        """
        if not self.hosts:
            return self.rank_seconds
        return [sorted(times)[: (len(times) + 1) // 2] for times in self.rank_seconds]

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

    def cache(self) -> float:
        """Return the bytes of a device's last-level cache: as measured on a CPU, else as stated.

        It is a part of the one that is stated where ranks or other work share that.
        """
        seconds = [undisturbed(row) for row in self.read_times]
        if not seconds or max(seconds) < _UNCACHED * min(seconds):
            return self.machine.cache
        middle = (min(seconds) + max(seconds)) / 2
        first = next(i for i, t in enumerate(seconds) if t > middle)
        if first == 0:
            return cache_of(self.read_bytes[0])
        (a, b), (before, after) = self.read_bytes[first - 1 : first + 1], seconds[first - 1 : first + 1]
        return cache_of(a + (b - a) * (middle - before) / (after - before))

    def bandwidth_ratio(self) -> float:
        """Return how much faster a device reads weights from memory while the others are idle."""
        if not self.alone:
            return 1.0
        times, ratios = [undisturbed(row) if row else math.inf for row in self.ops["float32"]], []
        samples = op_samples("float32", self.scale)
        for i, alone in zip(cold_samples(self.scale), self.alone, strict=True):
            # The sample before is the same product of a weight in a cache.
            if samples[i].fixed and times[i] > _MOSTLY_READING * times[i - 1]:
                ratios.append(times[i] / undisturbed(alone))
        return max(1.0, median(ratios)) if ratios else 1.0


def measure_pass(
    device: str, programs: Path, world: World, budget: Budget | None = None, crowded: bool = False
) -> Measurements:
    """Measure everything once, as one rank of a launch or alone. All ranks call this together; rank 0 has the result.

    `programs` is a folder that `write_programs` filled. A measurement takes at most its share of the `budget`. Of ranks
    that are `crowded`, only the collectives over all of them are measured.
    """
    scale, dtypes = scale_of(device), dtypes_of(device)
    if crowded:
        return _measure_crowded(device, world, budget)
    cold = cold_samples(scale)
    unit = math.inf
    if budget is not None:
        count = len(cold) + sum(len(op_samples(d, scale)) for d in dtypes) + _COLLECTIVE * _COLLECTIVES
        unit = budget.share(count + _PROGRAM * len([*programs.glob("*.dist")]))
    alone: Times = []
    launch = world if world.size > 1 else None
    if launch:
        if launch.rank == 0:
            samples = op_samples("float32", scale)
            alone = time_ops([samples[i] for i in cold], device, ALONE, unit)
        launch.exchange(0)
    collectives = time_collectives(launch, device, scale, _COLLECTIVE * unit) if launch else []
    machine = device_machine(device)
    reads = time_reads(machine.cache, lambda: None if launch is None else launch.exchange(0)) if device == "cpu" else []
    return Measurements(
        ranks=world.size,
        device=device,
        scale=scale,
        machine=machine,
        ops={d: _over_ranks(time_ops(op_samples(d, scale), device, world, unit), world) for d in dtypes},
        programs={dtypes[0]: time_programs(programs, dtypes[0], device, world, _PROGRAM * unit)},
        alone=alone,
        collectives=[kind for kind, _ in collectives],
        collective_times=[times for _, times in collectives],
        rank_seconds=time_ranks(launch, device) if launch else [],
        rank_memory=launch.exchange(machine.memory) if launch else [],
        read_bytes=[size for size, _ in reads],
        read_times=_over_ranks([times for _, times in reads], world),
        step_times=time_step_samples(programs, launch, _PROGRAM * unit) if launch and device == "cpu" else [],
        host_of=world.host_of,
    )


def _measure_crowded(device: str, world: World, budget: Budget | None) -> Measurements:
    scale, machine = scale_of(device), device_machine(device)
    limit = math.inf if budget is None else budget.share(_COLLECTIVES)
    found = time_collectives(world, device, scale, limit, parts=False)
    kinds, times = [kind for kind, _ in found], [seconds for _, seconds in found]
    return Measurements(world.size, device, scale, machine, {}, {}, [], kinds, times)


def with_collectives(first: Measurements, others: Sequence[Measurements]) -> Measurements:
    """Return measurements with the collectives of `others`, on more ranks."""
    return replace(
        first,
        ranks=max(m.ranks for m in (first, *others)),
        collectives=[kind for m in (first, *others) for kind in m.collectives],
        collective_times=[times for m in (first, *others) for times in m.collective_times],
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
        rank_seconds=merge([p.rank_seconds for p in passes]),
        rank_memory=first.rank_memory,
        read_bytes=first.read_bytes,
        read_times=merge([p.read_times for p in passes]),
        step_times=merge([p.step_times for p in passes]),
        host_of=first.host_of,
    )


def cold_samples(scale: int) -> list[int]:
    """Return the indices of the ops whose weights are read from memory."""
    return [i for i, sample in enumerate(op_samples("float32", scale)) if sample.cold]


def _over_ranks(times: Times, world: World) -> Times:
    """Return the lower median over ranks of each time, as of the reference of `unlike_ranks`; ranks measure at the same
    moment."""
    if world.size == 1:
        return times
    return [[median_low(at) for at in zip(*column, strict=True)] for column in zip(*world.exchange(times), strict=True)]


def device_machine(device: str) -> Machine:
    """Return the properties of this machine, or of its first GPU."""
    import torch

    if device == "cpu":
        cores = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
        instructions = instruction_sets(processor_flags())
        return Machine(_processor(), torch.__version__, _host_memory(), _host_cache(), instructions, cores)
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
