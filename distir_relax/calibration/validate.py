"""Validation: run configurations, and compare their times and memory with the simulator's predictions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from distir_relax.bundle import read_bundle, write_bundle
from distir_relax.bundle.host_slices import host_files
from distir_relax.calibration.calibrate import PASSES, fit, launch_measurement, measure_ranks
from distir_relax.calibration.comparison import Outcome, Validation
from distir_relax.calibration.configurations import Configuration, read_configurations
from distir_relax.calibration.machine_check import warn_of_mismatch
from distir_relax.calibration.measure import random_inputs, time_steps
from distir_relax.calibration.measurements import merge_passes
from distir_relax.calibration.memory_peak import step_peak
from distir_relax.calibration.other_work import warn_of_other_work
from distir_relax.calibration.statistics import undisturbed
from distir_relax.calibration.step_overhead import time_requests
from distir_relax.cost.profile import Profile
from distir_relax.errors import RunError
from distir_relax.runtime.agents.file_copies import LaunchFile
from distir_relax.runtime.hosts import THIS_MACHINE, HostList
from distir_relax.runtime.machine import limit_threads, retain_freed_memory
from distir_relax.runtime.session import Session
from distir_relax.runtime.world import World
from distir_relax.support.file_slices import HostFile

# Seconds of a pass of the calibration, of which an idle machine needs about 20: a busy one measures less often.
_PASS_BUDGET = 90.0
COMPARED = ("schedule", "chunks")
"""Default fields of strategies; configurations that differ only in these are compared for their order."""


def validate(
    targets: Sequence[str],
    profile: Profile | None,
    steps: int = 4,
    threads: int = 1,
    passes: int = PASSES,
    compared: Sequence[str] = COMPARED,
    require_signature: Path | None = None,
    device: str = "cpu",
    hosts: HostList = THIS_MACHINE,
) -> Validation:
    """Run configurations with mpirun in several passes, each rank with `threads` threads; compare them with `profile`.
    Ranks compute on `device`, of this machine or of `hosts`, which have all ranks of each configuration.

    A target is a bundle, or ``FILE.py:FUNCTION`` of a function that returns configurations by name: plans, training
    steps, steps of text generation, or pairs of a distributed program and its tensors. Inputs are random. Without a
    profile one is fitted to measurements taken in turn with the configurations, on as many ranks as the largest
    configuration. `compared` are fields of strategies. `require_signature` is the file of the public key that has
    signed the bundles. Raises RunError if a launch fails, and what `read_configurations` raises.
    """
    configurations = read_configurations(targets, compared, require_signature)
    if profile is not None and device == "cpu":
        warn_of_mismatch(profile)
    runs_by_configuration = [_Runs(c) for c in configurations]
    ranks = [c.ranks for c in configurations]
    measured = []
    with tempfile.TemporaryDirectory() as folder, warn_of_other_work():
        paths = [
            c.bundle.path or write_bundle(c.bundle, Path(folder) / f"{i}.dist") for i, c in enumerate(configurations)
        ]
        for number in range(passes):
            if profile is None:
                measured.append(measure_ranks(max(ranks), device, 1, _PASS_BUDGET, hosts))
            for count in sorted(set(ranks)):
                chosen = [i for i, n in enumerate(ranks) if n == count]
                bundles = [(str(configurations[i].bundle.key or ""), configurations[i].step) for i in chosen]
                request = {"bundles": bundles, "steps": steps, "peaks": number == 0, "device": device}
                of_chosen, answer_file = [paths[i] for i in chosen], Path(folder) / "answer.json"
                arguments = ["time-bundles", json.dumps(request), str(answer_file), *map(str, of_chosen)]
                files = [LaunchFile(str(path), partial(_slices, path)) for path in of_chosen]
                if launch_measurement(count, arguments, files, hosts, threads) != 0:
                    raise RunError(f"a configuration failed on {count} ranks", hint="its message is above")
                for i, answer in zip(chosen, json.loads(answer_file.read_text()), strict=True):
                    runs_by_configuration[i].take(answer)
    calibration = fit(merge_passes(measured)) if measured else None
    machine = calibration.profile if calibration else profile
    assert machine is not None
    outcomes = tuple(runs.outcome(machine) for runs in runs_by_configuration)
    return Validation(outcomes, calibration, tuple(compared))


@dataclass
class _Runs:
    """Measurements of a configuration: the seconds of the steps of each pass, and the peaks of each rank."""

    configuration: Configuration
    passes: list[list[float]] = field(default_factory=list)
    peaks: tuple[int, ...] = ()

    def take(self, answer: dict[str, Any]) -> None:
        self.passes.append(answer["seconds"])
        self.peaks = self.peaks or tuple(answer["peaks"])

    def outcome(self, machine: Profile) -> Outcome:
        c = self.configuration
        predicted = c.program.simulate(machine)
        peaks = tuple(int(n) for n in predicted.peak_memory) if self.peaks else ()
        return Outcome(
            c.name, c.ranks, predicted.makespan, undisturbed([t for times in self.passes for t in times]), peaks,
            self.peaks, c.group, c.kind, c.dtype, c.strategy, tuple(map(undisturbed, self.passes)), predicted.interval,
        )  # fmt: skip


def _slices(path: Path, ranks: Sequence[int]) -> Sequence[HostFile]:
    return host_files(read_bundle(path, verify_weights=False), ranks)


def time_bundles(request: str, answer: Path, paths: Sequence[Path], world: World) -> None:
    """As one rank of a launch, time bundles as `request` says, in JSON; rank 0 writes the seconds of steps of each, as
    on the slowest rank, and the memory peak on each rank if requested. That of text generation is not measured."""
    limit_threads(world.local_size)
    retain_freed_memory()
    options = json.loads(request)
    device = options["device"]
    results = []
    for path, (key, step) in zip(paths, options["bundles"], strict=True):
        bundle = read_bundle(path, verify_weights=False, require_signature=key or None)
        peaks: list[int] = []
        if step is not None:
            seconds = time_requests(world, bundle, device, options["steps"], *step)
        else:
            session = Session(bundle, device=device, world=world)
            if options["peaks"]:
                # Before calls are recorded: a recorded step's memory is taken once.
                inputs, updated = random_inputs(bundle.manifest), set(bundle.manifest.updates.values())
                outputs = [tensor.name for tensor in bundle.manifest.outputs if tensor.name not in updated]
                peaks = world.exchange(step_peak(session, inputs, outputs))
            seconds = time_steps(world, session, options["steps"])
        results.append({"seconds": seconds, "peaks": peaks})
    if world.rank == 0:
        answer.write_text(json.dumps(results))
