"""`distir validate`: run configurations for real and compare their times with what the simulator predicts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distir_relax.analysis.simulate import simulate_module
from distir_relax.bundle import Bundle, read_bundle, write_bundle
from distir_relax.calibration.calibrate import PASSES, Calibration, fit, measure_ranks
from distir_relax.calibration.measure import time_steps
from distir_relax.calibration.measurements import joined
from distir_relax.calibration.statistics import mean_absolute_percentage_error, spearman, undisturbed
from distir_relax.compiler import Plan, program_bundle
from distir_relax.cost.profile import Profile
from distir_relax.errors import ImportModelError, RunError
from distir_relax.given import Program, what_is
from distir_relax.ir import Module
from distir_relax.pipeline import as_ranks_run
from distir_relax.runtime.launch import launch
from distir_relax.runtime.machine import keep_memory, limit_threads
from distir_relax.runtime.verification import read_stage
from distir_relax.runtime.world import World
from distir_relax.user_function import call_function, find_function


@dataclass(frozen=True)
class Outcome:
    """One configuration: the seconds of a step, predicted and measured (undisturbed, of several steps)."""

    name: str
    ranks: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far off the prediction is: 0.1 is a tenth too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Validation:
    """All outcomes, and how well they agree; and the calibration that was made for them, if one was."""

    outcomes: tuple[Outcome, ...]
    calibration: Calibration | None = None

    @property
    def mape(self) -> float:
        """The mean absolute percentage error."""
        return mean_absolute_percentage_error(*self._columns())

    @property
    def spearman(self) -> float:
        """The rank correlation of predictions and measurements."""
        return spearman(*self._columns())

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"spearman": self.spearman, "mape": self.mape, "outcomes": [asdict(o) for o in self.outcomes]}

    def _columns(self) -> tuple[list[float], list[float]]:
        return [o.predicted for o in self.outcomes], [o.measured for o in self.outcomes]


def validate(
    targets: Sequence[str], profile: Profile | None, steps: int = 4, threads: int = 1, passes: int = PASSES
) -> Validation:
    """Run configurations with mpirun in several passes, each rank with `threads` threads; compare them with `profile`.

    A target is a bundle, or ``FILE.py:FUNCTION`` of a function that returns configurations by name: plans, or pairs of
    a distributed program and its tensors. Inputs are drawn at random. Without a profile one is fitted to measurements
    taken in turn with the configurations, on as many ranks as the largest of them has. Raises RunError when a launch
    fails, and what reading the targets raises.
    """
    configurations = [found for target in targets for found in _load(target)]
    if not configurations:
        raise ImportModelError("there is no configuration to run", ", ".join(targets))
    ranks = [bundle.manifest.mesh.size for _, _, bundle in configurations]
    seconds: list[list[float]] = [[] for _ in configurations]
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            bundle.path or write_bundle(bundle, Path(folder) / f"{i}.dist")
            for i, (_, _, bundle) in enumerate(configurations)
        ]
        for _ in range(passes):
            if profile is None:
                measured.append(measure_ranks(max(ranks), "cpu", 1))
            for count in sorted(set(ranks)):
                numbers = [i for i, n in enumerate(ranks) if n == count]
                found = _time_on(count, [paths[i] for i in numbers], steps, threads, Path(folder))
                for i, taken in zip(numbers, found, strict=True):
                    seconds[i] += taken
    calibration = fit(joined(measured)) if measured else None
    machine = calibration.profile if calibration else profile
    assert machine is not None
    outcomes = [
        Outcome(name, count, simulate_module(module, machine).makespan, undisturbed(taken))
        for (name, module, _), count, taken in zip(configurations, ranks, seconds, strict=True)
    ]
    return Validation(tuple(outcomes), calibration)


def _time_on(ranks: int, paths: Sequence[Path], steps: int, threads: int, folder: Path) -> list[list[float]]:
    """The seconds of steps of bundles, one launch for all."""
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps({"bundles": [str(path) for path in paths], "steps": steps}))
    if launch(ranks, ["time-bundles", str(request), str(answer)], threads) != 0:
        raise RunError(f"a configuration failed on {ranks} ranks", hint="its message is above")
    found: list[list[float]] = json.loads(answer.read_text())
    return found


def time_bundles(request: Path, answer: Path, world: World) -> None:
    """As one rank of a launch, run the bundles that `request` lists; rank 0 writes the seconds of the steps of each, as
    long as they are on the slowest rank."""
    limit_threads(world.local_size)
    keep_memory()
    asked = json.loads(request.read_text())
    found = [
        time_steps(world, read_bundle(Path(path), verify_weights=False), asked["steps"]) for path in asked["bundles"]
    ]
    if world.rank == 0:
        answer.write_text(json.dumps(found))


def _load(target: str) -> list[tuple[str, Module, Bundle]]:
    """The configurations of a target: name, distributed program, bundle."""
    if Path(target).is_dir():
        bundle = read_bundle(Path(target))
        module = read_stage(bundle, "distributed")
        return [(bundle.manifest.name, as_ranks_run(module), bundle)]
    made = call_function(find_function(target), target, {})
    if not isinstance(made, Mapping):
        raise ImportModelError(
            f"expected configurations by name, found {type(made).__name__}", target,
            "return {'name': plan, 'other': (module, tensors)}")  # fmt: skip
    return [_configuration(str(name), entry, target) for name, entry in made.items()]


def _configuration(name: str, entry: object, target: str) -> tuple[str, Module, Bundle]:
    found = what_is(entry, f"{target}, {name!r}")
    if isinstance(found, Plan):
        return name, as_ranks_run(found.modules["distributed"]), found.bundle(("torch",))
    if isinstance(found, Program) and found.tensors is not None:
        return name, as_ranks_run(found.module), program_bundle(name, found.module, found.tensors)
    raise ImportModelError(f"expected a plan or (module, tensors) for {name!r}, found {type(entry).__name__}", target)
