"""Fit of a profile to measurements: minimize the error of the cost model over its parameters.

The loss is the sum of squared logarithms of predicted over measured times, so that small and large ops have equal
weight. The search is a coordinate search: each parameter is scaled up and down by a factor that shrinks, without
gradients. That of a device only finds the region of a minimum, and a least-squares fit ends there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np
from scipy import optimize

from distir_relax.calibration.measure import CollectiveSample
from distir_relax.calibration.microbenchmarks import OpSample
from distir_relax.cost.profile import Line, Matrix, Profile
from distir_relax.cost.roofline import OpWork, repeated_seconds
from distir_relax.ops import Trait, lookup

T = TypeVar("T")

Parameters = dict[str, float]
_Timed = list[tuple[OpWork, float]]

# Maximum factor between a parameter and its start value.
_REACH = 1e5
# Rounds of the coordinate search in which the fit of a device begins.
_ROUGH = 25
# The overhead of a device relative to the time in which its host issues an op. It is hidden by that, and not measured.
_DEVICE_OVERHEAD = 0.2
# So small that it changes no time, and that no factor within the reach makes it large.
_NONE = 1e-12
# The parameters of a device that do not depend on the dtype.
_SHARED = ("overhead", "dispatch", "bandwidth", "cache_bandwidth", "overlap", "view")
# The fields of `Matrix` that are fitted; its bandwidth is `read`, as the device has one, too.
_PRODUCT = ("flops", "half_rows", "half_columns", "half_inner", "thin", "read", "half_area", "call")
# Those of an op that has products of its own, on a CPU.
_OWN_PRODUCT = {
    "flops": 5e10, "half_rows": 10.0, "half_columns": 10.0, "half_inner": 10.0, "bandwidth": 2e10, "call": 1e-5,
}  # fmt: skip


def fit_device(
    start: Profile, dtype: str, samples: Sequence[OpSample], seconds: Sequence[float], is_first: bool = True
) -> tuple[Profile, dict[str, float]]:
    """Fit the device of `start`, whose cache is known, to these times; return it with the median error of each group of
    ops. Only for the first dtype is that fitted which does not depend on the dtype."""
    least = max(1e-7, 0.8 * min(seconds))
    if is_first and start.kind != "cpu":
        start = replace(start, overhead=_DEVICE_OVERHEAD * least)
    begin: Parameters = {
        "overhead" if start.kind == "cpu" else "dispatch": least,
        "bandwidth": 2e10,
        "cache_bandwidth": 5e10,
        "flops": 1e11,
        "half_rows": 2.0,
        "half_columns": 8.0,
        "half_inner": 8.0,
        "thin": 3e10,
        "read": 2e10,
        "half_area": 10.0,
        "call": 1e-6,
        "overlap": 3.0,
        "view": 1e-6,
    }
    if start.kind != "cpu":
        # Its tiles are computed at the same time, wherever they are in the result.
        begin.update(half_rows=_NONE, half_columns=_NONE, half_area=1e6, half_inner=100.0)
        # Its host calls a product meanwhile.
        del begin["call"]
    begin.update({f"packed {key}": begin[key] for key in _PRODUCT if key in begin})
    if not is_first:
        begin = {key: value for key, value in begin.items() if key not in _SHARED} | _known_products(start)
    measured_alone = sorted(
        {s.op for s in samples if not s.group.startswith("products") and Trait.VIEW not in lookup(s.op).traits}
    )
    # Python calls an op of a CPU; on a GPU, whose host does so meanwhile, the device takes longer to start some.
    kind = "call" if start.kind == "cpu" else "start"
    owners: dict[str, str] = {}
    for name in measured_alone:
        figures = {f"op {name}": 5e9, f"{kind} {name}": 0.1 * least if kind == "start" else 1e-6}
        if start.kind == "cpu" and lookup(name).cost.cpu_product:
            figures = {f"own {key} {name}": value for key, value in _OWN_PRODUCT.items()}
        begin.update(figures)
        owners.update(dict.fromkeys(figures, name))
    prepared = _prepare(samples, seconds)
    groups: dict[str, _Timed] = {}
    for work, t in prepared:
        groups.setdefault(work.name if work.name in measured_alone else "", []).append((work, t))
    # Most parameters change the times of one op.
    losses = {name: partial(_loss, partial(_with, start, dtype), group) for name, group in groups.items()}
    rough, _ = separable_search(losses, owners, begin, rounds=_ROUGH)
    best, _ = least_squares(partial(_residuals, partial(_with, start, dtype), prepared), rough, 60, tolerance=1e-5)
    profile = _with(start, dtype, best)
    return profile, _group_errors(profile, samples, prepared)


def fit_quantized(
    start: Profile, dtype: str, samples: Sequence[OpSample], seconds: Sequence[float]
) -> tuple[Profile, dict[str, float]]:
    """Fit the products of weights in `dtype`, that of quantized values, to these times; return the profile with them,
    and the median error of each group. A backend packs such weights, as all that are constant."""
    begin: Parameters = dict(zip(_PRODUCT, (2e11, 2.0, 8.0, 8.0, 3e10, 2e10, 10.0, 1e-6), strict=True))
    prepared = _prepare(samples, seconds)

    def machine(x: Parameters) -> Profile:
        return replace(start, packed={**start.packed, dtype: _matrix(x)})

    best, _ = coordinate_search(partial(_loss, machine, prepared), begin)
    return machine(best), _group_errors(machine(best), samples, prepared)


def fit_links(start: Profile, times: Sequence[tuple[CollectiveSample, float]]) -> tuple[Profile, dict[str, float]]:
    """Add the times of each collective on each number of ranks to `start`; return it with the median errors of lines.

    `times` are seconds. The level of a send, the innermost one by default, gets its latency and bandwidth.
    """
    lines: list[Line] = []
    levels = list(start.levels)
    errors: dict[str, float] = {}
    for line in sorted({kind.line for kind, _ in times}):
        collective, ranks, recorded, place = line
        points = tuple(sorted((float(k.bytes), t) for k, t in times if k.line == line))
        latency, slope = fit_line([size for size, _ in points], [t for _, t in points])
        # Beyond the measurements, extrapolate from the last point.
        intercept = max(0.0, points[-1][1] - points[-1][0] * slope)
        lines.append(Line(collective, ranks, intercept, slope, points, recorded, place))
        error = median(abs((latency + size * slope) / t - 1) for size, t in points)
        if collective == "send":
            number = next((n for n, level in enumerate(levels) if level.name == place), 0)
            levels[number] = replace(levels[number], latency=latency, bandwidth=1.0 / slope)
        group = f"{collective}, recorded" if recorded else f"{collective}, {place}" if place else collective
        errors[group] = max(error, errors.get(group, 0.0))
    return replace(start, lines=tuple(lines), levels=tuple(levels)), errors


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit the line ``a + b * size`` with the least relative error; both are positive."""

    def loss(x: Parameters) -> float:
        return sum(math.log((x["a"] + x["b"] * n) / t) ** 2 for n, t in zip(sizes, seconds, strict=True))

    begin = {"a": min(seconds), "b": seconds[-1] / max(1.0, sizes[-1])}
    best, _ = coordinate_search(loss, begin)
    return best["a"], best["b"]


def coordinate_search(
    loss: Callable[[Parameters], float], start: Mapping[str, float], step: float = 0.7, rounds: int = 200
) -> tuple[Parameters, float]:
    """Return positive parameters at a minimum of `loss`, and its value there.

    A parameter with little influence stays within `_REACH` times its start value.
    """
    return separable_search({"": loss}, {}, start, step, rounds)


def separable_search(
    losses: Mapping[str, Callable[[Parameters], float]], owners: Mapping[str, str], start: Mapping[str, float],
    step: float = 0.7, rounds: int = 200,
) -> tuple[Parameters, float]:  # fmt: skip
    """`coordinate_search` of a sum of losses; a parameter in `owners` changes only the loss of that name."""
    x = dict(start)
    values = {name: loss(x) for name, loss in losses.items()}
    steps = dict.fromkeys(x, step)
    for _ in range(rounds):
        for key in x:
            changed = [owners[key]] if key in owners else list(losses)
            before = sum(values[name] for name in changed)
            for sign in (1.0, -1.0):
                candidate = x[key] * math.exp(sign * steps[key])
                if not start[key] / _REACH <= candidate <= start[key] * _REACH:
                    continue
                trial = {**x, key: candidate}
                found = {name: losses[name](trial) for name in changed}
                if sum(found.values()) < before:
                    x, values = trial, {**values, **found}
                    steps[key] *= 1.5
                    break
            else:
                steps[key] *= 0.5
        if max(steps.values()) < 1e-3:
            break
    return x, sum(values.values())


def least_squares(
    residuals: Callable[[Parameters], Sequence[float]], start: Mapping[str, float], rounds: int = 20,
    tolerance: float = 1e-4,
) -> tuple[Parameters, float]:  # fmt: skip
    """Return positive parameters with the least sum of squared residuals, and that sum.

    A trust-region fit over the logarithms of the parameters: it needs far fewer evaluations of `residuals` than
    `coordinate_search`, for residuals that are expensive. It ends when a step improves the sum by less than a fraction
    `tolerance`.
    """
    keys = list(start)

    def parameters_at(logarithms: Sequence[float]) -> Parameters:
        return {key: start[key] * math.exp(x - 1) for key, x in zip(keys, logarithms, strict=True)}

    # The variables start at 1, so that a relative step of 2 % changes a parameter by 2 %.
    result = optimize.least_squares(
        lambda x: np.array(residuals(parameters_at(x))), np.ones(len(keys)), diff_step=0.02, ftol=tolerance,
        xtol=tolerance * 1e-3, max_nfev=rounds,
    )  # fmt: skip
    return parameters_at(result.x), 2 * float(result.cost)


def _prepare(samples: Sequence[OpSample], seconds: Sequence[float]) -> _Timed:
    return [(sample.work, t) for sample, t in zip(samples, seconds, strict=True)]


def _loss(machine: Callable[[Parameters], Profile], prepared: _Timed, x: Parameters) -> float:
    return sum(residual**2 for residual in _residuals(machine, prepared, x))


def _residuals(machine: Callable[[Parameters], Profile], prepared: _Timed, x: Parameters) -> list[float]:
    profile = machine(x)
    return [math.log(repeated_seconds(profile, work) / t) for work, t in prepared]


def _group_errors(profile: Profile, samples: Sequence[OpSample], prepared: _Timed) -> dict[str, float]:
    errors: dict[str, list[float]] = {}
    for sample, (work, t) in zip(samples, prepared, strict=True):
        errors.setdefault(sample.group, []).append(abs(repeated_seconds(profile, work) / t - 1))
    return {group: median(values) for group, values in errors.items()}


def _known_products(profile: Profile) -> Parameters:
    """Return the rates of products of the dtype that was fitted first, with which the fit of another one begins."""
    found: Parameters = {}
    for prefix, table in (("", profile.matrix), ("packed ", profile.packed)):
        matrix = next(iter(table.values()))
        for key in _PRODUCT if profile.kind == "cpu" else _PRODUCT[:-1]:
            found[f"{prefix}{key}"] = getattr(matrix, "bandwidth" if key == "read" else key)
    return found


def _matrix(x: Parameters, prefix: str = "") -> Matrix:
    values = {key: x[f"{prefix}{key}"] for key in _PRODUCT if f"{prefix}{key}" in x}
    return Matrix(bandwidth=values.pop("read"), **values)


def _with(start: Profile, dtype: str, x: Parameters) -> Profile:
    calls = {key[5:]: t for key, t in x.items() if key.startswith("call ")}
    own: dict[str, Parameters] = {}
    for key, value in x.items():
        if key.startswith("own "):
            _, figure, name = key.split(" ")
            own.setdefault(name, {})[figure] = value
    return replace(
        start,
        overhead=x.get("overhead", start.overhead),
        dispatch=x.get("dispatch", start.dispatch),
        bandwidth=x.get("bandwidth", start.bandwidth),
        cache_bandwidth=x.get("cache_bandwidth", start.cache_bandwidth),
        overlap=max(1.0, x.get("overlap", start.overlap)),
        view=x.get("view", start.view),
        matrix={**start.matrix, dtype: _matrix(x)},
        packed={**start.packed, dtype: _matrix(x, "packed ")},
        vector={**start.vector, dtype: median(rate for key, rate in x.items() if key.startswith("op "))},
        ops={**start.ops, dtype: {key[3:]: rate for key, rate in x.items() if key.startswith("op ")}},
        starts=_added(start.starts, dtype, {key[6:]: t for key, t in x.items() if key.startswith("start ")}),
        calls=_added(start.calls, dtype, calls),
        call=median(calls.values()) if calls and not start.calls else start.call,
        products=_added(start.products, dtype, {name: Matrix(**figures) for name, figures in own.items()}),
    )


def _added(table: Mapping[str, Mapping[str, T]], dtype: str, row: Mapping[str, T]) -> dict[str, Mapping[str, T]]:
    """Return a table with the row of a dtype, if there is anything in it."""
    return {**table, dtype: row} if row else dict(table)
