"""Ops in a program are slower than the same op again and again: their data lies further away, and a Python line stands
between two. Communications are too: ranks come to them at unlike times, with tensors that were just made.

So a factor and an overhead of each of the two are fitted to the times of whole programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from distir_relax.analysis.simulator import simulate_module
from distir_relax.calibration.fit import least_squares
from distir_relax.calibration.programs import ProgramSample
from distir_relax.cost.profile import Level, Line, Matrix, Profile


def fit_programs(
    profile: Profile, samples: Sequence[ProgramSample], seconds: Sequence[float]
) -> tuple[Profile, dict[str, float]]:
    """`profile` with ops and communications as slow as they are in programs, and the median errors of programs of one
    device and of several. What fits a cache lies in a nearer one when an op runs again and again, so the bandwidth of
    the cache is that of programs."""
    several = any(sample.devices > 1 for sample in samples)

    def machine(x: Mapping[str, float]) -> Profile:
        found = slowed(profile, x["factor"], x["overhead"])
        if profile.cache:
            found = replace(found, cache_bandwidth=x["cache_bandwidth"])
        return delayed(found, x["communication factor"], x["communication overhead"]) if several else found

    def errors(x: Mapping[str, float]) -> list[float]:
        found = machine(x)
        return [simulate_module(s.module, found).makespan / t for s, t in zip(samples, seconds, strict=True)]

    start = {"factor": 1.1, "overhead": 1e-6}
    if profile.cache:
        start["cache_bandwidth"] = 3 * profile.bandwidth
    if several:
        start.update({"communication factor": 1.1, "communication overhead": 1e-6})
    x, _ = least_squares(lambda x: [math.log(ratio) for ratio in errors(x)], start)
    off: dict[str, list[float]] = {}
    for sample, ratio in zip(samples, errors(x), strict=True):
        group = "programs" if sample.devices == 1 else "programs of all ranks"
        off.setdefault(group, []).append(abs(ratio - 1))
    return machine(x), {group: median(found) for group, found in off.items()}


def slowed(profile: Profile, factor: float, overhead: float) -> Profile:
    """A machine whose ops take `factor` times as long, and `overhead` seconds more."""

    def products(table: dict[str, Matrix]) -> dict[str, Matrix]:
        return {
            dtype: replace(m, flops=m.flops / factor, thin=m.thin / factor, bandwidth=m.bandwidth / factor)
            for dtype, m in table.items()
        }

    return replace(
        profile,
        overhead=profile.overhead * factor + overhead,
        bandwidth=profile.bandwidth / factor,
        matrix=products(dict(profile.matrix)),
        packed=products(dict(profile.packed)),
        vector={dtype: rate / factor for dtype, rate in profile.vector.items()},
        ops={dtype: {name: rate / factor for name, rate in table.items()} for dtype, table in profile.ops.items()},
    )


def delayed(profile: Profile, factor: float, overhead: float) -> Profile:
    """A machine whose communications take `factor` times as long, and `overhead` seconds more."""

    def level(row: Level) -> Level:
        return replace(row, latency=row.latency * factor + overhead, bandwidth=row.bandwidth / factor)

    def line(row: Line) -> Line:
        return replace(
            row,
            latency=row.latency * factor + overhead,
            seconds_per_byte=row.seconds_per_byte * factor,
            points=tuple((size, seconds * factor + overhead) for size, seconds in row.points),
        )

    return replace(profile, levels=tuple(map(level, profile.levels)), lines=tuple(map(line, profile.lines)))
