"""Write profiles as TOML for `read_profile`."""

from __future__ import annotations

from dataclasses import fields
from json import dumps

from distir_relax.cost.profile import KINDS, RUNTIME, Profile


def print_profile(profile: Profile, comment: str = "") -> str:
    """Return the profile as TOML, with `comment` at the top."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f'name = "{profile.name}"', f"devices = {profile.devices}"]
    if profile.collective_overhead:
        lines.append(f"collective_overhead = {profile.collective_overhead:.6g}")
    if profile.beside != 1.0:
        lines.append(f"beside = {profile.beside:.6g}")
    lines += ["", "[device]", *([f'kind = "{profile.kind}"'] if profile.kind != KINDS[0] else [])]
    names = ("processor", "instructions")
    lines += [f"{name} = {dumps(value)}" for name in names if (value := getattr(profile, name))]
    lines += [f"cores = {profile.cores}"] if profile.cores else []
    lines += [f"memory = {profile.memory:.6g}", f"bandwidth = {profile.bandwidth:.6g}"]
    lines += [f"overhead = {profile.overhead:.6g}", f"overlap = {profile.overlap:.6g}"]
    if profile.bandwidth_alone:
        lines.append(f"bandwidth_alone = {profile.bandwidth_alone:.6g}")
    if profile.cache:
        lines += [f"cache = {profile.cache:.6g}", f"cache_bandwidth = {profile.cache_bandwidth:.6g}"]
    runtime = [f"{key} = {value:.6g}" for key in RUNTIME if (value := getattr(profile, key))]
    waits = ", ".join(f'"{name}"' for name in sorted(profile.waits))
    runtime += [f"waits = [{waits}]"] if waits else []
    runtime += [] if profile.in_place else ["in_place = false"]
    runtime += ["caching_allocator = true"] if profile.caching_allocator else []
    lines += ["", "[runtime]", *runtime] if runtime else []
    matrices = {f"matrix.{dtype}": matrix for dtype, matrix in profile.matrix.items()}
    matrices |= {f"packed.{dtype}": matrix for dtype, matrix in profile.packed.items()}
    matrices |= {
        f'products.{dtype}."{name}"': matrix for dtype, row in profile.products.items() for name, matrix in row.items()
    }
    for name, matrix in matrices.items():
        lines += ["", f"[device.{name}]", f"flops = {matrix.flops:.6g}"]
        lines += [f"{key} = {getattr(matrix, key):.6g}" for key in ("half_rows", "half_columns", "half_inner")]
        others = ("thin", "bandwidth", "tile", "half_area", "call")
        lines += [f"{key} = {getattr(matrix, key):.6g}" for key in others if getattr(matrix, key)]
    lines += ["", "[device.vector]", *(f"{dtype} = {rate:.6g}" for dtype, rate in profile.vector.items())]
    for kind, numbers in (("ops", profile.ops), ("starts", profile.starts), ("calls", profile.calls)):
        for dtype, row in numbers.items():
            lines += ["", f"[device.{kind}.{dtype}]", *(f'"{name}" = {number:.6g}' for name, number in row.items())]
    if (errors := profile.uncertainty) is not None:
        lines += ["", "[uncertainty]", *(f"{f.name} = {getattr(errors, f.name):.6g}" for f in fields(errors))]
    for group in profile.groups:
        lines += ["", "[[group]]", f'devices = "{group}"', f"speed = {group.speed:.6g}"]
        lines += [] if group.memory is None else [f"memory = {group.memory:.6g}"]
    for level in profile.levels:
        lines += ["", "[[level]]", f'name = "{level.name}"', f"size = {level.size}"]
        lines += [f"latency = {level.latency:.6g}", f"bandwidth = {level.bandwidth:.6g}"]
        lines += [f"uplink = {level.uplink:.6g}"] if level.uplink else []
        lines += [] if level.overlaps else ["overlaps = false"]
    for line in profile.lines:
        lines += ["", "[[collective]]", f'name = "{line.collective}"', f"ranks = {line.ranks}"]
        lines += [f"latency = {line.latency:.6g}", f"seconds_per_byte = {line.seconds_per_byte:.6g}"]
        if line.points:
            points = ", ".join(f"[{size:.6g}, {seconds:.6g}]" for size, seconds in line.points)
            lines.append(f"points = [{points}]")
        lines += ["recorded = true"] if line.recorded else []
        lines += [f"level = {dumps(line.level)}"] if line.level else []
    return "\n".join(lines) + "\n"
