"""Overhead of ops and communications in whole programs.

Ops in a program are slower than in a microbenchmark: their data is in more distant caches, and Python code runs between
them. Communications are slower too: ranks arrive at different times, with tensors that were just computed. So a factor
and an overhead for each of the two are fitted to the times of whole programs.

The programs are few, and much smaller than those of users. The factor of ops and the bandwidth of the cache would be
far from what the ops say if they had to explain all that is wrong with small programs. So the deviation of each from
its prior value counts as much as the errors of all programs together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from distir_relax.calibration.fit import least_squares
from distir_relax.calibration.programs import ProgramSample
from distir_relax.cost.profile import Level, Line, Matrix, Profile
from distir_relax.runtime.backends.recorded_calls import MOST_BYTES

# The weight of a parameter's prior relative to all programs.
_PRIOR = 1.0


def fit_programs(
    profile: Profile, samples: Sequence[ProgramSample], seconds: Sequence[float]
) -> tuple[Profile, dict[str, float]]:
    """Fit the slowdown of ops and communications in programs; return the profile with it, and the median errors of
    programs of one device and of several. The cache bandwidth is that of programs, as a repeated op has its operands
    in a nearer cache."""
    several = any(sample.devices > 1 for sample in samples)

    def machine(x: Mapping[str, float]) -> Profile:
        slow = scale_ops(profile, x.get("factor", 1.0), x["overhead"])
        slow = replace(slow, cache_bandwidth=x.get("cache_bandwidth", profile.cache_bandwidth))
        return scale_communication(slow, x["communication factor"], x["communication overhead"]) if several else slow

    def errors(x: Mapping[str, float]) -> list[float]:
        fitted = machine(x)
        return [s.simulate(fitted).makespan / t for s, t in zip(samples, seconds, strict=True)]

    # On a GPU these programs mostly wait for the host.
    prior = {} if profile.is_asynchronous else {"factor": 1.0}
    if profile.cache and prior:
        prior["cache_bandwidth"] = profile.cache_bandwidth
    start = {**prior, "overhead": 1e-6}
    if several:
        start.update({"communication factor": 1.1, "communication overhead": 1e-6})
    weight = _PRIOR * math.sqrt(len(samples))

    def residuals(x: Mapping[str, float]) -> list[float]:
        away = [weight * math.log(x[key] / value) for key, value in prior.items()]
        return [*(math.log(ratio) for ratio in errors(x)), *away]

    x, _ = least_squares(residuals, start)
    group_errors: dict[str, list[float]] = {}
    for sample, ratio in zip(samples, errors(x), strict=True):
        group = "programs" if sample.devices == 1 else "programs of all ranks"
        group_errors.setdefault(group, []).append(abs(ratio - 1))
    return machine(x), {group: median(values) for group, values in group_errors.items()}


def scale_ops(profile: Profile, factor: float, overhead: float) -> Profile:
    """Return a machine whose ops take `factor` times as long, plus `overhead` seconds.

    They are the host's if it issues ops, else Python's, in programs that are not recorded.
    """
    on_host = overhead if profile.is_asynchronous else 0.0

    def products(table: Mapping[str, Matrix]) -> dict[str, Matrix]:
        return {
            name: replace(m, flops=m.flops / factor, thin=m.thin / factor, bandwidth=m.bandwidth / factor)
            for name, m in table.items()
        }

    return replace(
        profile,
        overhead=profile.overhead * factor,
        python=overhead - on_host,
        recorded=0.0 if profile.is_asynchronous else float(MOST_BYTES),
        dispatch=profile.dispatch + on_host,
        bandwidth=profile.bandwidth / factor,
        matrix=products(profile.matrix),
        packed=products(profile.packed),
        products={dtype: products(table) for dtype, table in profile.products.items()},
        vector={dtype: rate / factor for dtype, rate in profile.vector.items()},
        ops={dtype: {name: rate / factor for name, rate in table.items()} for dtype, table in profile.ops.items()},
        starts={dtype: {name: t * factor for name, t in table.items()} for dtype, table in profile.starts.items()},
    )


def scale_communication(profile: Profile, factor: float, overhead: float) -> Profile:
    """Return a machine whose communications take `factor` times as long, plus `overhead` seconds: on a CPU in programs
    that are not recorded, and by lines that are not."""
    everywhere = overhead if profile.is_asynchronous else 0.0

    def level(row: Level) -> Level:
        return replace(row, latency=row.latency * factor + everywhere, bandwidth=row.bandwidth / factor)

    def line(row: Line) -> Line:
        if row.recorded:
            # It was measured as programs run it.
            return row
        return replace(
            row,
            latency=row.latency * factor + everywhere,
            seconds_per_byte=row.seconds_per_byte * factor,
            points=tuple((size, seconds * factor + everywhere) for size, seconds in row.points),
        )

    return replace(
        profile,
        levels=tuple(map(level, profile.levels)),
        lines=tuple(map(line, profile.lines)),
        python_collective=overhead - everywhere,
    )
