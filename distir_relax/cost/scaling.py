"""Scaling of a machine's figures for what-if questions: ``network.bandwidth=2x, device.memory=40GB``.

A figure has a dotted name, by its place in the profile. A family is several figures that describe one resource: it is
scaled as one. A factor multiplies a figure, so that ``2x`` of a bandwidth is faster and ``2x`` of a latency slower.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from distir_relax.cost.heterogeneous import Group
from distir_relax.cost.profile import LARGEST, RUNTIME, SMALLEST, Level, Line, Matrix, Profile, check_uplinks
from distir_relax.errors import ProfileError
from distir_relax.support.units import SIZES, TIMES, read_quantity


def scale_profile(profile: Profile, text: str) -> Profile:
    """Return the machine with figures changed by `text`: ``NAME=FACTORx`` or ``NAME=VALUE``, separated by commas.

    Names are those of `scalable`; a later item is applied to the result of an earlier one. A value is in bytes, seconds
    or per second, or has a unit (``40GB``, ``25GB/s``, ``3us``). For a family, it is that of the figure with this name,
    and the others change by the same factor. The result's name has the changes. Raises `ProfileError` for an unknown
    name, a value that is not of its kind, and a figure that would leave its range.
    """
    items = [item.strip() for item in text.split(",")]
    result = profile
    for item in items:
        name, equals, value = map(str.strip, item.partition("="))
        if not equals or not name or not value:
            raise ProfileError(f"expected NAME=FACTORx or NAME=VALUE, found {item!r}", text, "for example: " + _EXAMPLE)
        result = _scale(result, name, value, text)
    _check(result, text)
    return replace(result, name=f"{profile.name} with {', '.join(items)}")


def faster(profile: Profile, names: tuple[str, ...], factor: float) -> Profile:
    """Return the machine with families or figures `factor` times as fast: rates multiplied, times divided.

    Names that the machine does not have are skipped; its name is unchanged.
    """
    known = _names(profile)
    chosen = {figure for name in names for figure in known.get(name, ())}
    return _change(profile, lambda name, value: _faster(name, value, factor) if name in chosen else value)


def scalable(profile: Profile) -> dict[str, tuple[str, ...]]:
    """Return the names that `scale_profile` takes, each with the figures that it changes."""
    return {name: tuple(members) for name, members in _names(profile).items()}


def has(profile: Profile, name: str) -> bool:
    """Whether a machine has a figure or family that is not zero."""
    values = _figures(profile)
    return any(values[figure] for figure in _names(profile).get(name, ()))


def _scale(profile: Profile, name: str, value: str, where: str) -> Profile:
    known, values = _names(profile), _figures(profile)
    if name not in known:
        name = f"level.{name}"
    members = known.get(name)
    if members is None:
        raise _unknown(profile, name.removeprefix("level."), known, where)
    factor = _factor(name, value, values, where)
    if factor is None:
        new = _absolute(name, value, where)
        return _change(profile, lambda figure, old: new if figure == name else old)
    if not any(values[figure] for figure in members):
        raise ProfileError(
            f"{name} of {profile.name} is 0, which no factor changes", where, f"give a value, as in {name}=1e-6"
        )
    # Lines state seconds per byte, the inverse of a bandwidth.
    inverse = name.endswith("bandwidth")
    return _change(
        profile,
        lambda figure, old: (
            old if figure not in members else old / factor if inverse and _is_inverse(figure) else old * factor
        ),
    )


def _unknown(profile: Profile, name: str, known: Mapping[str, object], where: str) -> ProfileError:
    near = difflib.get_close_matches(name, [n.removeprefix("level.") for n in known], n=3, cutoff=0.5)
    common = [n.removeprefix("level.") for n in known if n.count(".") < 2 or n.startswith("level.")]
    suggested = f"did you mean {' or '.join(near)}? " if near else ""
    return ProfileError(
        f"{profile.name} has no figure {name!r}", where,
        f"{suggested}it has {', '.join(common)}, and by their places in the file others such as device.vector.float32",
    )  # fmt: skip


def _factor(name: str, value: str, values: Mapping[str, float], where: str) -> float | None:
    """Return the factor of an item; None for a value of a single figure that is 0."""
    match = _FACTOR.fullmatch(value)
    if match is not None:
        factor = float(match["factor"])
        if not 1e-15 <= factor <= 1e15:
            raise ProfileError(f"expected a factor from 1e-15 to 1e15, found {value}", where)
        return factor
    if name not in values:
        raise ProfileError(f"expected a factor for the figures of {name}, found {value!r}", where, f"write {name}=2x")
    new, old = _absolute(name, value, where), values[name]
    if old and new and math.isfinite(old):
        return new / old
    return None


def _absolute(name: str, value: str, where: str) -> float:
    kind, units = _kind(name)
    number = read_quantity(value, units)
    if number is None:
        raise ProfileError(
            f"expected a factor such as 2x, or {kind}, for {name}, found {value!r}", where, "for example: " + _EXAMPLE
        )
    return number


def _kind(name: str) -> tuple[str, Mapping[str, float]]:
    """Return the kind of a figure in words, and its units."""
    last = name.rpartition(".")[2]
    if last in ("bandwidth", "bandwidth_alone", "cache_bandwidth", "uplink"):
        return "a rate such as 25GB/s", {f"{unit}/s": scale for unit, scale in SIZES.items()}
    if last in ("memory", "cache", "recorded"):
        return "a size such as 40GB", SIZES
    if last in ("latency", "overhead", "collective_overhead", *RUNTIME) or name.startswith(_TIMES_BY_OP):
        return "a time such as 3us", TIMES
    return "a number", {}


def _check(profile: Profile, where: str) -> None:
    """Raise `ProfileError` if a figure is outside of the range that a profile's file may have."""
    for name, value in _figures(profile).items():
        low, high = _RANGES.get(name, (SMALLEST, LARGEST))
        is_allowed = low <= value <= high or math.isinf(value) or (value == 0 and not _POSITIVE.fullmatch(name))
        if not is_allowed:
            raise ProfileError(f"expected {name} from {low:g} to {high:g}, found {value:g}", where)
    check_uplinks(profile.levels, where)
    if profile.cache and not profile.cache_bandwidth:
        raise ProfileError(f"expected the bandwidth of a cache, which {profile.name} does not have", where,
                           "give both: device.cache=4MB,device.cache_bandwidth=5TB/s")  # fmt: skip


def _names(profile: Profile) -> dict[str, list[str]]:
    """Return the figures of each name: families first, then levels, then single figures.

    The prefix ``level.`` may be left out where no family has the name.
    """
    figures = list(_figures(profile))
    families: dict[str, list[str]] = {}
    for family, pattern in _FAMILIES.items():
        if members := [figure for figure in figures if re.fullmatch(pattern, figure)]:
            families[family] = members
    for level in profile.levels:
        # A level may be called as a family is: its full name has a prefix.
        for key, line_key in (("bandwidth", "seconds_per_byte"), ("latency", "latency")):
            lines = [_line_name(line, line_key) for line in profile.lines if _level_of(profile, line) is level]
            families[f"level.{level.name}.{key}"] = [f"level.{level.name}.{key}", *lines]
    return families | {figure: [figure] for figure in figures if figure not in families}


def _level_of(profile: Profile, line: Line) -> Level:
    """Return the level whose links a measured line describes: by its name, or the innermost one with as many ranks."""
    named = [level for level in profile.levels if level.name == line.level]
    return next((level for level in named or profile.levels if line.ranks <= level.size), profile.levels[-1])


def _figures(profile: Profile) -> dict[str, float]:
    values: dict[str, float] = {}

    def note(name: str, value: float) -> float:
        values[name] = value
        return value

    _change(profile, note)
    return values


def _change(profile: Profile, new: _Change) -> Profile:
    """Return the machine with each figure replaced by ``new(name, figure)``."""
    scalars: dict[str, Any] = {
        item.name: new(_scalar_name(item.name), getattr(profile, item.name))
        for item in fields(Profile)
        if item.type == "float"
    }
    return replace(
        profile,
        **scalars,
        matrix=_products(profile.matrix, "device.matrix", new),
        packed=_products(profile.packed, "device.packed", new),
        products={dtype: _products(row, f"device.products.{dtype}", new) for dtype, row in profile.products.items()},
        vector={dtype: new(f"device.vector.{dtype}", rate) for dtype, rate in profile.vector.items()},
        ops=_by_op(profile.ops, "device.ops", new),
        starts=_by_op(profile.starts, "device.starts", new),
        calls=_by_op(profile.calls, "device.calls", new),
        levels=tuple(_level(level, new) for level in profile.levels),
        lines=tuple(_line(line, new) for line in profile.lines),
        groups=tuple(_group(number, group, new) for number, group in enumerate(profile.groups)),
    )


def _by_op(table: Mapping[str, Mapping[str, float]], above: str, new: _Change) -> dict[str, dict[str, float]]:
    return {
        dtype: {op: new(f"{above}.{dtype}.{op}", value) for op, value in row.items()} for dtype, row in table.items()
    }


def _products(table: Mapping[str, Matrix], above: str, new: _Change) -> dict[str, Matrix]:
    return {
        dtype: Matrix(**{item.name: new(f"{above}.{dtype}.{item.name}", getattr(matrix, item.name))
                         for item in fields(Matrix)})
        for dtype, matrix in table.items()
    }  # fmt: skip


def _level(level: Level, new: _Change) -> Level:
    figures = [item.name for item in fields(Level) if item.type == "float"]
    changed: dict[str, Any] = {key: new(f"level.{level.name}.{key}", getattr(level, key)) for key in figures}
    return replace(level, **changed)


def _group(number: int, group: Group, new: _Change) -> Group:
    return group if group.memory is None else replace(group, memory=new(f"group.{number}.memory", group.memory))


def _line(line: Line, new: _Change) -> Line:
    """Change a measured line. Of its points, the time of no bytes changes as its latency, the rest as its bandwidth."""
    latency = new(_line_name(line, "latency"), line.latency)
    per_byte = new(_line_name(line, "seconds_per_byte"), line.seconds_per_byte)
    if not line.points or (latency, per_byte) == (line.latency, line.seconds_per_byte):
        return replace(line, latency=latency, seconds_per_byte=per_byte)
    constant = min(line.latency, *(seconds for _, seconds in line.points))
    of_latency = latency / line.latency if line.latency else 1.0
    of_bytes = per_byte / line.seconds_per_byte if line.seconds_per_byte else 1.0
    points = tuple((size, constant * of_latency + (seconds - constant) * of_bytes) for size, seconds in line.points)
    return replace(line, latency=latency, seconds_per_byte=per_byte, points=points)


def _line_name(line: Line, key: str) -> str:
    level = f".{line.level}" if line.level else ""
    return f"collective.{line.collective}.{line.ranks}{level}{'.recorded' * line.recorded}.{key}"


def _scalar_name(name: str) -> str:
    if name in _OUTSIDE_DEVICE:
        return name
    return f"{'runtime' if name in RUNTIME else 'device'}.{name}"


def _faster(name: str, value: float, factor: float) -> float:
    return value / factor if _is_inverse(name) or _kind(name)[1] is TIMES else value * factor


def _is_inverse(name: str) -> bool:
    return name.endswith(".seconds_per_byte")


_Change = Callable[[str, float], float]
_EXAMPLE = "network.bandwidth=2x,device.flops=0.5x,device.memory=40GB"
_FACTOR = re.compile(r"(?P<factor>\d+(\.\d*)?(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?)\s*x", re.ASCII)
_TIMES_BY_OP = ("device.starts.", "device.calls.")
_OUTSIDE_DEVICE = ("beside", "collective_overhead")
_RANGES = {"beside": (0.0, 1.0), "device.overlap": (1.0, math.inf)}
_POSITIVE = re.compile(
    r"device\.(memory|bandwidth|overlap|(vector|ops)\..*)|group\..*|level\..*\.bandwidth|.*\.(flops|seconds_per_byte)"
)
"""Figures that are never 0; others are 0 where they were not measured, or take no time."""
_FAMILIES = {
    "device.flops": r"device\.(matrix|packed|products)\..*\.(flops|thin)|device\.(vector|ops)\..*",
    "device.bandwidth": r"device\.(bandwidth|bandwidth_alone|cache_bandwidth|(matrix|packed|products)\..*\.bandwidth)",
    "device.overhead": r"device\.(overhead|starts\..*)",
    "device.memory": r"device\.memory|group\.\d+\.memory",
    "runtime.times": (
        r"runtime\.(dispatch|view|shape_op|call|python.*|step|request.*)|device\.calls\..*|device\..*\.call"
    ),
    "network.bandwidth": r"level\..*\.(bandwidth|uplink)|collective\..*\.seconds_per_byte",
    "network.latency": r"level\..*\.latency|collective\..*\.latency|collective_overhead",
}
"""Families of figures, as patterns of their names."""
