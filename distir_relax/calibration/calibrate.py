"""`distir calibrate`: measure this machine, fit a profile, report how well it fits."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from distir_relax.analysis.profile import Level, Profile, load_profile, print_profile
from distir_relax.calibration.fit import fit_device, fit_links
from distir_relax.calibration.measure import CollectiveTime, time_collectives, time_ops
from distir_relax.calibration.programs import fit_programs, time_programs
from distir_relax.calibration.samples import op_samples
from distir_relax.errors import RunError
from distir_relax.runtime.inputs import atomic_file, check_writable
from distir_relax.runtime.launch import launch
from distir_relax.runtime.session import keep_memory, limit_threads
from distir_relax.runtime.world import World

DTYPES = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}
"""The dtypes that are measured on each kind of device."""


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, and the median error of its predictions for each group of ops and each collective."""

    profile: Profile
    errors: Mapping[str, float]


def calibrate(output: Path, ranks: int, device: str, name: str = "", links: str | None = None) -> Calibration:
    """Measure `ranks` devices of this machine with mpirun, fit a profile and write it to `output`.

    With one rank there are no collectives to measure: the links are those of the profile `links`, if given. Raises
    RunError when ranks cannot be started or fail, or `output` cannot be written.
    """
    check_writable(output)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        if ranks == 1:
            measure(file, device, None)
        elif launch(ranks, ["measure", str(file), "--device", device]) != 0:
            raise RunError("the measurement failed on some rank", hint="its messages are above; distir doctor may help")
        measured = json.loads(file.read_text())
    found = fit(measured, name or f"{platform.node()}-{device}", ranks, device, links)
    lines = [
        f"Fitted by `distir calibrate` to {device} on {measured['machine']}, {ranks} ranks, torch {measured['torch']}.",
        "Median errors of the fit: " + ", ".join(f"{group} {error:.0%}" for group, error in found.errors.items()) + ".",
    ]
    with atomic_file(output) as temporary:
        temporary.write_text(print_profile(found.profile, "\n".join(lines)))
    return found


def measure(output: Path, device: str, world: World | None) -> None:
    """Run the microbenchmarks as one rank of a launch, or alone; rank 0 writes the times to `output` as JSON."""
    import torch

    limit_threads(world.local_size if world else 1)
    keep_memory()
    scale = 1 if device == "cpu" else 6
    ops = {dtype: time_ops(op_samples(dtype, scale), device, world) for dtype in DTYPES[device]}
    alone = _alone(ops["float32"], device, scale, world)
    whole = {dtype: time_programs(dtype, scale, device, world) for dtype in DTYPES[device]}
    collectives = time_collectives(world, device, scale) if world and world.size > 1 else []
    card = torch.cuda.get_device_properties(0) if device != "cpu" else None
    found: dict[str, Any] = {
        "ops": ops,
        "programs": whole,
        "alone": alone,
        "collectives": [t.plain() for t in collectives],
        "memory": card.total_memory if card else _host_memory(),
        "cache": card.L2_cache_size if card else _host_cache(),
        "scale": scale,
        "machine": torch.cuda.get_device_name(0) if device != "cpu" else _processor(),
        "torch": torch.__version__,
    }
    if world is None or world.rank == 0:
        output.write_text(json.dumps(found))


def fit(measured: Mapping[str, Any], name: str, ranks: int, device: str, links: str | None = None) -> Calibration:
    """The profile that explains measurements, as `measure` writes them."""
    level = Level("this machine", max(2, ranks), 1e-6, 1e10)
    levels = load_profile(links).levels if links else (level,)
    # The ranks of a host share its memory and its last cache.
    share = ranks if device == "cpu" else 1
    memory, cache = float(measured["memory"]) / share, float(measured["cache"]) / share
    profile = Profile(name, max(ranks, levels[-1].size), memory, 1.0, 0.0, {}, {}, levels, cache=cache)
    errors: dict[str, float] = {}
    for dtype, seconds in measured["ops"].items():
        profile, found = fit_device(profile, dtype, op_samples(dtype, int(measured["scale"])), seconds)
        suffix = "" if len(measured["ops"]) == 1 else f" {dtype}"
        errors.update({f"{group}{suffix}": error for group, error in found.items()})
    for dtype, seconds in measured["programs"].items():
        profile, error = fit_programs(profile, dtype, int(measured["scale"]), seconds)
        errors["programs" if len(measured["ops"]) == 1 else f"programs {dtype}"] = error
    profile = replace(profile, bandwidth_alone=profile.bandwidth * float(measured["alone"]))
    times = [CollectiveTime(**row) for row in measured["collectives"]]
    if times:
        profile, found = fit_links(profile, times)
        errors.update(found)
    return Calibration(profile, errors)


def _alone(together: list[float], device: str, scale: int, world: World | None) -> float:
    """How much faster a device reads weights from memory while the others do nothing."""
    if world is None or world.size == 1:
        return 1.0
    samples = op_samples("float32", scale)
    cold = [i for i, sample in enumerate(samples) if sample.cold]
    mine = time_ops([samples[i] for i in cold], device, None) if world.rank == 0 else []
    world.exchange(0)
    return max(1.0, median(together[i] / t for i, t in zip(cold, mine, strict=True))) if world.rank == 0 else 1.0


def _host_memory() -> int:
    import os

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
