"""`distir calibrate`: measure this machine, fit a profile, report how well it fits."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distir_relax.calibration.fit import fit_device, fit_links
from distir_relax.calibration.measurements import Measurements, joined, take
from distir_relax.calibration.programs import programs, write_programs
from distir_relax.calibration.samples import dtypes_of, op_samples, scale_of
from distir_relax.calibration.slowdown import fit_programs
from distir_relax.calibration.statistics import undisturbed
from distir_relax.cost.profile import Level, Profile, load_profile
from distir_relax.cost.written import print_profile
from distir_relax.errors import RunError
from distir_relax.runtime.inputs import atomic_file, check_writable
from distir_relax.runtime.launch import launch
from distir_relax.runtime.machine import keep_memory, limit_threads
from distir_relax.runtime.world import World

PASSES = 7
"""How often everything is measured: a machine is not equally fast at all times."""


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, and the median error of its predictions for each group of ops and each collective."""

    profile: Profile
    errors: Mapping[str, float]
    machine: str

    def write(self, output: Path) -> None:
        """Write the profile as TOML, with its errors in a comment. Raises RunError when it cannot be written."""
        lines = [
            f"Fitted by `distir calibrate` to {self.machine}.",
            "Median errors of the fit: "
            + ", ".join(f"{group} {error:.0%}" for group, error in self.errors.items())
            + ".",
        ]
        with atomic_file(output) as temporary:
            temporary.write_text(print_profile(self.profile, "\n".join(lines)))


def calibrate(
    output: Path, ranks: int, device: str, name: str = "", links: str | None = None, passes: int = PASSES
) -> Calibration:
    """Measure `ranks` devices of this machine with mpirun, fit a profile and write it to `output`.

    With one rank there are no collectives to measure: the links are those of the profile `links`, if given. Raises
    RunError when ranks cannot be started or fail, or `output` cannot be written.
    """
    check_writable(output)
    found = fit(measure_ranks(ranks, device, passes), name, links)
    found.write(output)
    return found


def measure_ranks(ranks: int, device: str, passes: int) -> Measurements:
    """What `ranks` devices of this machine take, measured with mpirun. Raises RunError as `calibrate` does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        for dtype in dtypes_of(device):
            write_programs(Path(folder), dtype, scale_of(device), ranks)
        if ranks == 1:
            measure(file, device, passes, Path(folder), None)
        elif launch(ranks, ["measure", str(file), folder, "--device", device, "--passes", str(passes)]) != 0:
            raise RunError("the measurement failed on some rank", hint="its messages are above; distir doctor may help")
        return Measurements.of(json.loads(file.read_text()))


def measure(output: Path, device: str, passes: int, folder: Path, world: World | None) -> None:
    """Run the microbenchmarks, and the programs in `folder`, as one rank of a launch, or alone; rank 0 writes the times
    to `output` as JSON."""
    limit_threads(world.local_size if world else 1)
    keep_memory()
    found = joined([take(device, folder, world) for _ in range(passes)])
    if world is None or world.rank == 0:
        output.write_text(json.dumps(found.plain()))


def fit(measured: Measurements, name: str = "", links: str | None = None) -> Calibration:
    """The profile that explains measurements; `name` is by default that of this host and the kind of device."""
    ranks, machine = measured.ranks, measured.machine
    level = Level("this machine", max(2, ranks), 1e-6, 1e10)
    levels = load_profile(links).levels if links else (level,)
    # The ranks of a host share its memory and its last cache.
    share = ranks if measured.device == "cpu" else 1
    memory, cache = machine.memory / share, machine.cache / share
    name = name or f"{platform.node()}-{measured.device}"
    kind = "cpu" if measured.device == "cpu" else "gpu"
    profile = Profile(name, max(ranks, levels[-1].size), memory, 1.0, 0.0, {}, {}, levels, cache=cache, kind=kind)
    errors: dict[str, float] = {}

    def note(found: Mapping[str, float], dtype: str) -> None:
        suffix = "" if len(measured.ops) == 1 else f" {dtype}"
        errors.update({f"{group}{suffix}": error for group, error in found.items()})

    for dtype, times in measured.ops.items():
        seconds = [undisturbed(row) for row in times]
        profile, found = fit_device(profile, dtype, op_samples(dtype, measured.scale), seconds)
        note(found, dtype)
    if measured.collectives:
        rows = zip(measured.collectives, measured.collective_times, strict=True)
        profile, found = fit_links(profile, [(kind, undisturbed(times)) for kind, times in rows])
        errors.update(found)
    profile = replace(profile, bandwidth_alone=profile.bandwidth * measured.bandwidth_ratio())
    for dtype, times in measured.programs.items():
        seconds = [undisturbed(row) for row in times]
        profile, found = fit_programs(profile, programs(dtype, measured.scale, ranks), seconds)
        note(found, dtype)
    return Calibration(profile, errors, f"{measured.device} on {machine.name}, {ranks} ranks, torch {machine.torch}")
