"""Residuals of a fit, and the uncertainties of its predictions that follow.

Each measured op leaves a residual, and those of a kind have a standard deviation. Ops of one kind and different sizes
are off in different directions, so in a program their errors average out in part: the deviations of all kinds are
multiplied by one factor of at most 1, with which they explain the residuals of whole programs. If they explain too
little, the rest is the deviation of programs. The noise of the programs' times is left out of both.

Deviations are those that 68 % of the residuals do not exceed: residuals have long tails, which roots of mean squares
follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from distir_relax.calibration.measure import CollectiveSample
from distir_relax.calibration.microbenchmarks import OpSample
from distir_relax.calibration.programs import ProgramSample
from distir_relax.calibration.statistics import undisturbed
from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import error_kind, repeated_seconds
from distir_relax.cost.uncertainty import Uncertainty
from distir_relax.ops import lookup

Residuals = dict[str, list[float]]
"""By kind of op (`OP_KINDS`), the logarithms of predicted over measured times."""

_WITHIN_ONE = 0.6827
"""The share of a normal distribution within one standard deviation."""
_FITTED = 5
"""Parameters that are fitted to programs: degrees of freedom that their residuals lack."""


def op_residuals(profile: Profile, samples: Sequence[OpSample], seconds: Sequence[float]) -> Residuals:
    """Return the residuals of measured ops."""
    found: Residuals = {}
    for sample, t in zip(samples, seconds, strict=True):
        entry = lookup(sample.op)
        work = sample.work
        found.setdefault(error_kind(profile, entry), []).append(math.log(repeated_seconds(profile, work) / t))
    return found


def collective_residuals(times: Sequence[tuple[CollectiveSample, float]]) -> Residuals:
    """Return the residuals of each measured point of a line, interpolated between its neighbors."""
    lines: dict[tuple[str, int, bool, str], list[tuple[float, float]]] = {}
    for kind, t in times:
        lines.setdefault(kind.line, []).append((kind.bytes, t))
    found = []
    for points in map(sorted, lines.values()):
        for (a, before), (b, t), (c, after) in zip(points, points[1:], points[2:], strict=False):
            found.append(math.log((before + (b - a) / (c - a) * (after - before)) / t))
    return {"collectives": found} if found else {}


def deviation(residuals: Sequence[float]) -> float:
    """Return the standard deviation around 0, as that which 68 % of normally distributed residuals do not exceed."""
    ordered = sorted(map(abs, residuals))
    return ordered[min(len(ordered) - 1, int(_WITHIN_ONE * len(ordered)))]


def repeatability(times: Sequence[Sequence[float]]) -> float:
    """Return the relative standard deviation of undisturbed times that were each measured several times.

    As in `calibration.comparison`, from halves of the times: half of the deviation of their differences.
    """
    pairs = [(undisturbed(row[::2]), undisturbed(row[1::2])) for row in times if len(row) > 1]
    return 0.5 * deviation([math.log(a / b) for a, b in pairs]) if pairs else 0.0


def fit_uncertainty(
    profile: Profile, residuals: Residuals, programs: Sequence[ProgramSample], times: Sequence[Sequence[float]]
) -> Uncertainty:
    """Return the uncertainties of a fitted profile from the residuals of its ops, and the `times` of `programs`."""
    kinds = Uncertainty(**{kind: deviation(values) for kind, values in residuals.items()})
    noise = repeatability(times)
    if not programs:
        return replace(kinds, repeatability=noise)
    of_programs, variances = [], []
    for sample, row in zip(programs, times, strict=True):
        found = sample.simulate(profile)
        of_programs.append(math.log(found.makespan / undisturbed(row)))
        variances.append(kinds.of_kinds(found.seconds_by_kind()) ** 2)
    count = len(of_programs)
    squared = deviation(of_programs) ** 2 * count / max(1, count - _FITTED)
    own, explained = max(0.0, squared - noise**2), fmean(variances)
    factor = math.sqrt(min(1.0, own / explained)) if explained else 1.0
    scaled = Uncertainty(**{kind: factor * getattr(kinds, kind) for kind in residuals})
    return replace(scaled, programs=math.sqrt(max(0.0, own - explained)), repeatability=noise)


def merged(parts: Sequence[Mapping[str, Sequence[float]]]) -> Residuals:
    """Return the residuals of several groups of measurements together."""
    found: Residuals = {}
    for part in parts:
        for kind, values in part.items():
            found.setdefault(kind, []).extend(values)
    return found
