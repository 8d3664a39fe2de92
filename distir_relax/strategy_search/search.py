"""The best strategy for a model, a training, or what a function in a file makes: `dr.search`."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distir_relax.calibration.comparison import Validation
from distir_relax.calibration.validate import validate
from distir_relax.compiler.compile import Plan
from distir_relax.compiler.inputs import Model, call_target, read_target, what_is
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.compiler.training import Training
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError
from distir_relax.runtime.launcher_detection import detect
from distir_relax.strategy_search import Outcome, Search, Space, search_by_steps, search_grid, search_on_ranks
from distir_relax.strategy_search.compact_timeline import strips
from distir_relax.strategy_search.grid_search import Told
from distir_relax.strategy_search.search_space import POWERS
from distir_relax.support.user_function import find_function


def search(
    model: Any,
    *,
    devices: int,
    profile: Profile | str | Path,
    global_batch: int | Sequence[int] | None = None,
    microbatches: Sequence[int] = POWERS,
    schedules: Sequence[str] = ("1f1b",),
    chunks: Sequence[int] = (1,),
    zero: Sequence[int] = (0,),
    checkpoint: Sequence[str] = ("none",),
    sequence_parallel: Sequence[bool] = (False,),
    placements: Sequence[str] = ("rules",),
    stages: Sequence[str] = (),
    workers: int | None = None,
    resume: str | Path | None = None,
    told: Told | None = None,
    by_steps: bool = False,
    time_lines: bool = False,
) -> Search:
    """Simulate a model under every strategy for so many devices, and find the fastest that fits into memory.

    `model` is (model, example_inputs), a `Training`, the path of an ONNX file, or ``file.py:function`` of a function
    that returns one of these; the function may have a parameter `global_batch`. `global_batch` is how many samples a
    step has, several numbers for several searches in one: with such a function any, otherwise no more than the example
    has, which is the default. All D x T x P of `devices` are tried, with the numbers of `microbatches`, and the
    `schedules`, `chunks`, ZeRO stages, `checkpoint`s and `sequence_parallel`s where they make a difference;
    with ``placements=("rules", "auto")`` stages are laid out by optimisation, too
    (`planner.Space`). Stages are cut as for the largest batch, or at `stages`.

    It uses `workers` processes, as many as there are cores unless given; under mpirun, where all ranks call this, the
    ranks but the first, and all return what they find. `resume` is a file that keeps what is done; a
    search that is given it again goes on. `told` hears of each outcome. With `time_lines` each outcome has its own,
    for a page.

    With `by_steps` each D x T x P is tried once, and options around the best of these (`planner.steps`); what weights
    alone show not to fit is ruled out. That is for spaces of which too many strategies would be simulated.

    Raises a `DistIRError`: for a profile of fewer devices, a batch that is larger than the example, and as reading the
    model does. A strategy that the model cannot have is no error: its outcome says why it is `refused`.
    """
    machine = as_profile(profile)
    if machine.devices < devices:
        raise DistIRError(
            f"{devices} devices were asked for, the profile {machine.name} has {machine.devices}",
            hint="give a profile of more devices or nodes: NAME:NODES",
        )
    wanted = (global_batch,) if isinstance(global_batch, int) else tuple(global_batch or ())
    source, batches = _read(model, wanted, tuple(stages), machine)
    space = Space(
        devices, batches, source.is_training, tuple(microbatches), tuple(schedules), tuple(chunks), tuple(zero),
        tuple(checkpoint), tuple(sequence_parallel), tuple(placements),
    )  # fmt: skip
    draw = strips if time_lines else None
    if by_steps:
        _check_steps(resume)
        return search_by_steps(source, machine, space, workers=workers, told=told, draw=draw)
    if detect() == "mpi":
        return search_on_ranks(source, machine, space, resume, told, draw)
    return search_grid(source, machine, space, workers=workers, resume=resume, told=told, draw=draw)


def _check_steps(resume: str | Path | None) -> None:
    if resume is not None or detect() == "mpi":
        raise DistIRError(
            "a search by steps runs in processes of one machine, and keeps no file",
            hint="leave out --resume and mpirun, or --by-steps",
        )


def execute(model: str, outcomes: Sequence[Outcome], profile: Profile, steps: int = 4, passes: int = 1) -> Validation:
    """Run strategies for real, with mpirun on this machine: the seconds of a step, predicted and measured.

    `model` is ``file.py:function``, whose model has weights. Raises `DistIRError` where it cannot be compiled or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = write_bundles(model, outcomes, profile, Path(folder))
        return validate([str(path) for path in paths], profile, steps, passes=passes)


def write_bundles(model: str, outcomes: Sequence[Outcome], profile: Profile, folder: Path) -> list[Path]:
    """Compile a model under strategies that a search found: bundles ``0.dist``, ``1.dist``, ... in `folder`.

    `model` is as for `execute`. Raises `DistIRError` where it cannot be compiled, or nothing can be written.
    """
    paths = []
    for number, outcome in enumerate(outcomes):
        found = _made(model, outcome.samples)
        name = f"{number}: {outcome.strategy}, batch {outcome.samples}"
        made = found.compile(strategy=outcome.strategy, profile=profile, name=name)
        plan = made if isinstance(made, Plan) else made.plan
        paths.append(plan.save(folder / f"{number}.dist", ("torch",)))
    return paths


def _read(
    model: Any, wanted: tuple[int, ...], stages: tuple[str, ...], machine: Profile
) -> tuple[Source, tuple[int, ...]]:
    """The model, read in with a batch larger than any that is wanted, and the batches."""
    free = False
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        free = "global_batch" in inspect.signature(find_function(str(model))).parameters
        # One that is twice as large leaves some for what is not written out (`Microbatches`).
        found = _made(str(model), 2 * max(wanted) if wanted and free else None)
    elif isinstance(model, (str, Path)):
        found = _searched(read_target(model))
    else:
        found = _searched(model if isinstance(model, Training) else what_is(model))
    source = found.read(CompileOptions(stages=stages, profile=machine))
    batch = source.batch
    if batch is None:
        raise DistIRError("the model has no batch that could be split", hint="give an example with several samples")
    if wanted and max(wanted) > batch:
        raise DistIRError(
            f"a batch of {max(wanted)} was asked for, the model's example has {batch} samples",
            hint="give a larger example, or a function with a parameter global_batch",
        )
    return source, wanted or (batch,)


def _made(target: str, batch: int | None) -> Model | Training:
    found, _ = call_target(target, {"global_batch": batch})
    return _searched(found, target)


def _searched(found: object, where: str = "") -> Model | Training:
    if isinstance(found, (Model, Training)):
        return found
    raise DistIRError(
        f"a search compiles a model many times, found {type(found).__name__}", where,
        "return a model with example inputs, or a Training",
    )  # fmt: skip
