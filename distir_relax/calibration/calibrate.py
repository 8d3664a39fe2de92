"""Calibration: measure this machine, fit a profile, and report its errors."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distir_relax.calibration.budget import Budget
from distir_relax.calibration.fit import fit_device, fit_links, fit_quantized
from distir_relax.calibration.measure import HOST, NETWORK, groups_of
from distir_relax.calibration.measurements import Measurements, Times, measure_pass, merge_passes, with_collectives
from distir_relax.calibration.microbenchmarks import QUANTIZED, dtypes_of, op_samples, scale_of
from distir_relax.calibration.other_work import warn_of_other_work
from distir_relax.calibration.program_overhead import fit_programs
from distir_relax.calibration.programs import ProgramSample, programs, write_programs
from distir_relax.calibration.residuals import Residuals, collective_residuals, fit_uncertainty, merged, op_residuals
from distir_relax.calibration.statistics import undisturbed
from distir_relax.calibration.step_overhead import fit_steps, step_samples, write_step_samples
from distir_relax.calibration.unlike_ranks import unlike_ranks
from distir_relax.cost.profile import Level, Profile, load_profile
from distir_relax.cost.profile_writer import print_profile
from distir_relax.errors import RunError
from distir_relax.runtime.agents.file_copies import LaunchFile
from distir_relax.runtime.hosts import THIS_MACHINE, HostList
from distir_relax.runtime.inputs import atomic_file, check_writable
from distir_relax.runtime.launch import launch, launch_on_hosts
from distir_relax.runtime.machine import limit_threads, retain_freed_memory
from distir_relax.runtime.world import ALONE, World

PASSES = 7
"""Maximum number of measurement passes; a machine's speed varies over time."""

BUDGET = 120.0
"""Default time limit of a calibration in seconds."""

MAX_ERROR = 0.5
"""Median error of a group of measurements above which a fit is rejected.

On an idle machine groups are 6 to 27 % off (`distir_relax/cost/profiles/cpu-local.toml`). Good strategies differ by
tens of percent: a profile with a median error of 50 % cannot order them.
"""

# Seconds reserved for the fit, and for starting the ranks.
_FIT = 20.0
# The share of the time of a measurement for the collectives of one number of ranks that have no cores of their own.
_CROWDED_SHARE = 0.1


@dataclass(frozen=True)
class Calibration:
    """A fitted profile, and the median error of its predictions for each group of ops and each collective."""

    profile: Profile
    errors: Mapping[str, float]
    machine: str

    def check(self, worst: float = MAX_ERROR) -> None:
        """Raise RunError if the median error of a group is above `worst`."""
        rejected = {group: error for group, error in self.errors.items() if not error <= worst}
        if rejected:
            rejected_text = ", ".join(f"{group} {error:.0%}" for group, error in rejected.items())
            accepted_text = ", ".join(f"{group} {e:.0%}" for group, e in self.errors.items() if group not in rejected)
            raise RunError(
                f"the fit is not usable: the median error is above {worst:.0%} for {rejected_text}"
                + (f" (within it: {accepted_text})" if accepted_text else ""),
                hint="the machine was busy, or too slow for the time limit: stop other work, give each rank a core of "
                "its own, or more time with --budget; --max-error accepts larger errors",
            )

    def write(self, output: Path) -> None:
        """Write the profile as TOML, with its errors in a comment. Raise RunError if it cannot be written."""
        lines = [
            f"Fitted by `distir calibrate` to {self.machine}.",
            "Median errors of the fit: "
            + ", ".join(f"{group} {error:.0%}" for group, error in self.errors.items())
            + ".",
        ]
        with atomic_file(output) as temporary:
            temporary.write_text(print_profile(self.profile, "\n".join(lines)))


def calibrate(
    output: Path, ranks: int, device: str, name: str = "", links: str | None = None, passes: int = PASSES,
    budget: float = BUDGET, worst: float = MAX_ERROR, hosts: HostList = THIS_MACHINE,
) -> Calibration:  # fmt: skip
    """Measure `ranks` devices of this machine with mpirun, or of `hosts`, fit a profile and write it to `output`.

    It takes about `budget` seconds (0: no limit). One rank cannot measure collectives: its links are those of the
    profile `links`, if given. Raises RunError if ranks cannot be started or fail, `output` cannot be written, or a
    group's median error is above `worst`; nothing is written then. Warns of other work on the machine.
    """
    check_writable(output)
    if Path(output).suffix != ".toml":
        raise RunError("expected the name of a .toml file for the profile", str(output))
    with warn_of_other_work():
        measured = measure_ranks(ranks, device, passes, budget, hosts)
    calibration = fit(measured, name, links)
    calibration.check(worst)
    calibration.write(output)
    return calibration


def measure_ranks(
    ranks: int, device: str, passes: int, budget: float = 0.0, hosts: HostList = THIS_MACHINE
) -> Measurements:
    """Measure `ranks` devices of this machine with mpirun, or of `hosts`. Raises RunError as `calibrate` does.

    Ranks of a CPU that have no core of their own compute in turns: ops and programs are measured on as many ranks as
    there are cores, and only the collectives on more. Of the `budget`, in seconds, the time of a fit is reserved; 0 is
    no limit.
    """
    deadline = Budget(budget)
    together = min(ranks, len(os.sched_getaffinity(0))) if device == "cpu" and not hosts else ranks
    with tempfile.TemporaryDirectory() as folder:
        # What programs add to their ops does not depend on the dtype.
        write_programs(Path(folder), dtypes_of(device)[0], scale_of(device), together)
        if device == "cpu":
            write_step_samples(Path(folder), together)
        # Measure for at least one second, even if the budget is spent.
        seconds = max(1.0, deadline.left - _FIT) if budget else 0.0
        crowded = range(together + 1, ranks + 1)
        share = _CROWDED_SHARE * seconds
        seconds = max(1.0, seconds - share * len(crowded)) if budget else 0.0
        measured = _launch_measurement(together, device, passes, Path(folder), seconds, hosts=hosts)
        of_more = [_launch_measurement(n, device, passes, Path(folder), share, crowded=True) for n in crowded]
    return with_collectives(measured, of_more)


def _launch_measurement(
    ranks: int, device: str, passes: int, folder: Path, seconds: float, crowded: bool = False,
    hosts: HostList = THIS_MACHINE,
) -> Measurements:  # fmt: skip
    file = folder / "measured.json"
    options = ["--device", device, "--passes", str(passes), "--seconds", f"{seconds:g}"]
    arguments = ["measure", str(file), str(folder), *options, *(["--crowded"] if crowded else [])]
    if ranks == 1:
        measure(file, device, passes, folder, ALONE, seconds)
    elif launch_measurement(ranks, arguments, [LaunchFile(str(folder))], hosts) != 0:
        raise RunError("the measurement failed on some rank", hint="its messages are above; distir doctor may help")
    return Measurements.of(json.loads(file.read_text()))


def launch_measurement(
    ranks: int, arguments: Sequence[str], files: Sequence[LaunchFile], hosts: HostList, threads: int | None = None
) -> int:
    """Launch ranks that read `files`, on this machine or on hosts; return the exit code.

    Raises RunError unless the first host is this machine: rank 0 writes.
    """
    if not hosts:
        return launch(ranks, arguments, threads)
    if not hosts.hosts[0].is_this:
        raise RunError(
            f"expected this machine as the first host, found {hosts.hosts[0].name}", "--host",
            "rank 0, on the first, writes the measurements",
        )  # fmt: skip
    if ranks != hosts.ranks:
        raise RunError(f"expected hosts with {ranks} ranks together, found {hosts.ranks}", "--host")
    return launch_on_hosts(hosts.hosts, arguments, hosts.rsh, threads, files)


def measure(
    output: Path, device: str, passes: int, folder: Path, world: World, seconds: float = 0.0,
    crowded: bool = False,
) -> None:  # fmt: skip
    """Run the microbenchmarks, and the programs in `folder`, as one rank of a launch, or alone; rank 0 writes the times
    to `output` as JSON. At least one pass, and up to `passes` within `seconds` (0: all of them). Ranks that are
    `crowded` have no cores of their own: only collectives over all of them are measured."""
    budget = Budget(seconds, world)
    limit_threads(world.local_size)
    retain_freed_memory()
    measurements = merge_passes(budget.passes(passes, lambda: measure_pass(device, folder, world, budget, crowded)))
    if world.rank == 0:
        output.write_text(json.dumps(measurements.plain()))


def _levels(measured: Measurements) -> tuple[Level, ...]:
    """Return the levels of links, whose figures are not known yet: those of hosts, if these have equally many ranks."""
    ranks, is_gpu = measured.ranks, measured.device != "cpu"
    if not measured.hosts:
        return (Level("this machine", max(2, ranks), 1e-6, 1e10, overlaps=is_gpu),)
    levels = [Level(NETWORK, ranks, 1e-4, 1e8)]
    within = [count for count, _, level in groups_of(measured.host_of) if level == HOST]
    return (*(Level(HOST, count, 1e-6, 1e10, overlaps=is_gpu) for count in within[-1:]), *levels)


def fit(measured: Measurements, name: str = "", links: str | None = None) -> Calibration:
    """Fit a profile to measurements; `name` is by default that of this host and the kind of device."""
    ranks, machine = measured.ranks, measured.machine
    levels = load_profile(links).levels if links else _levels(measured)
    # The ranks of a host share its memory.
    memory, cache = machine.memory / measured.share(0), measured.cache()
    name = name or f"{platform.node()}-{measured.device}"
    kind = "cpu" if measured.device == "cpu" else "gpu"
    profile = Profile(
        name, max(ranks, levels[-1].size), memory, 1.0, 0.0, {}, {}, levels, cache=cache, kind=kind,
        processor=machine.name, instructions=machine.instructions, cores=machine.cores,
    )  # fmt: skip
    errors: dict[str, float] = {}
    residuals: list[Residuals] = []

    def add_errors(group_errors: Mapping[str, float], dtype: str) -> None:
        suffix = "" if len(measured.ops) == 1 else f" {dtype}"
        errors.update({f"{group}{suffix}": error for group, error in group_errors.items()})

    for dtype, times in measured.ops.items():
        rows = [(s, undisturbed(row)) for s, row in zip(op_samples(dtype, measured.scale), times, strict=True) if row]
        samples, seconds = [sample for sample, _ in rows], [t for _, t in rows]
        if dtype in QUANTIZED:
            profile, group_errors = fit_quantized(profile, dtype, samples, seconds)
        else:
            profile, group_errors = fit_device(profile, dtype, samples, seconds, is_first=not profile.matrix)
        residuals.append(op_residuals(profile, samples, seconds))
        add_errors(group_errors, dtype)
    if measured.collectives:
        collective_seconds = [
            (kind, undisturbed(times))
            for kind, times in zip(measured.collectives, measured.collective_times, strict=True)
        ]
        profile, group_errors = fit_links(profile, collective_seconds)
        residuals.append(collective_residuals(collective_seconds))
        errors.update(group_errors)
    memory_by_rank = [n / measured.share(rank) for rank, n in enumerate(measured.rank_memory)]
    groups = unlike_ranks(measured.comparable_rank_seconds(), memory_by_rank)
    profile = replace(profile, groups=groups)
    samples_of_programs: list[ProgramSample] = []
    program_times: Times = []
    for dtype, times in measured.programs.items():
        samples_of_dtype = programs(dtype, measured.scale, measured.together)
        profile, group_errors = fit_programs(profile, samples_of_dtype, [undisturbed(row) for row in times])
        samples_of_programs += samples_of_dtype
        program_times += times
        add_errors(group_errors, dtype)
    if measured.step_times:
        profile = fit_steps(profile, step_samples(measured.together), [undisturbed(row) for row in measured.step_times])
    uncertainty = fit_uncertainty(profile, merged(residuals), samples_of_programs, program_times)
    # Ranks run programs of one device at the same time: they do not have the memory alone.
    profile = replace(profile, uncertainty=uncertainty, bandwidth_alone=profile.bandwidth * measured.bandwidth_ratio())
    return Calibration(profile, errors, f"{measured.device} on {machine.name}, {ranks} ranks, torch {machine.torch}")
