"""Search for the best strategy of a model, a training, or a function's result: `dr.search`."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distir_relax.calibration.comparison import Validation
from distir_relax.calibration.validate import validate
from distir_relax.compiler.compile import Plan
from distir_relax.compiler.inputs import (
    Model,
    SavedBundle,
    call_target,
    classify_input,
    in_precision,
    read_target,
    with_dims,
)
from distir_relax.compiler.larger_example import repeat_example
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.compiler.training import Training
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError
from distir_relax.layout import symbols_of
from distir_relax.runtime.launcher_detection import detect
from distir_relax.strategy_search import Outcome, Search, Space, search_grid, search_locally, search_on_ranks
from distir_relax.strategy_search.compact_timeline import compact_timeline
from distir_relax.strategy_search.grid_search import OutcomeCallback
from distir_relax.strategy_search.search_space import POWERS
from distir_relax.support.user_function import find_function


def search(
    model: Any,
    *,
    devices: int,
    profile: Profile | str | Path,
    global_batch: int | Sequence[int] | None = None,
    microbatches: Sequence[int] = POWERS,
    stages: Sequence[str] = (),
    workers: int | None = None,
    resume: str | Path | None = None,
    on_outcome: OutcomeCallback | None = None,
    by_steps: bool = False,
    time_lines: bool = False,
    dims: Mapping[str, int] | None = None,
    precision: str | None = None,
    keep: Sequence[str] = (),
    **options: Sequence[Any],
) -> Search:
    """Simulate a model under every strategy for `devices`, and find the fastest that fits in memory.

    `model` is (model, example_inputs), a `Training`, the path of an ONNX file, or ``file.py:function`` of a function
    that returns one of these; the function may have a parameter `global_batch`. `global_batch` is the number of samples
    of a step, or several for several searches in one, by default that of the example; of an ONNX file without a
    symbolic batch at most that. `dims` are values of other symbolic sizes, by default typical ones. All D x T x P
    of `devices` are tried, with the numbers of `microbatches`, and the values of `options` where they make a
    difference: ``zero=(0, 1)``, ``schedules=("1f1b", "zb-h1")``; with ``placements=("rules", "auto")`` stages are
    autosharded, too (`search_space.Space`). Stages are cut for the largest batch, or at `stages`. `precision` and
    `keep` are those of `compile`; a `Training` has its own.

    It uses `workers` processes (default: the number of cores); under mpirun, where all ranks call this, all ranks but
    the first, and all return the result. `resume` is a file of outcomes; a search with the same file resumes.
    `on_outcome` is called for each outcome. With `time_lines` each outcome has a timeline, for a page.

    With `by_steps` each D x T x P is tried once, and options around the best of these (`local_search`); strategies
    whose weights alone do not fit are ruled out. Use it for large spaces.

    Raises a `DistIRError`: for an option that is not registered, for a profile of fewer devices, a batch that is larger
    than the example, a deterministic training step, and as importing the model does. A strategy that the model does not
    support is no error: its outcome is `refused`, with the reason.
    """
    machine = as_profile(profile)
    if machine.devices < devices:
        raise DistIRError(
            f"{devices} devices were requested, the profile {machine.name} has {machine.devices}",
            hint="give a profile of more devices or nodes: NAME:NODES",
        )
    requested = (global_batch,) if isinstance(global_batch, int) else tuple(global_batch or ())
    target = in_precision(with_dims(_target(model, requested), dims or {}), precision, keep)
    source, batches = _read(target, requested, tuple(stages), machine)
    if source.training is not None and source.training.pieces is not None:
        raise DistIRError(
            "a deterministic training step has one strategy for a number of ranks: there is nothing to search",
            hint="leave out deterministic=, or simulate it: distir simulate --strategy D/1/1/1",
        )
    space = Space(devices, batches, source.is_training, microbatches, **options)
    draw = compact_timeline if time_lines else None
    if detect() == "mpi":
        return search_on_ranks(source, machine, space, resume, on_outcome, draw, by_steps)
    run = search_locally if by_steps else search_grid
    return run(source, machine, space, workers=workers, resume=resume, on_outcome=on_outcome, draw=draw)


def execute(
    model: str, outcomes: Sequence[Outcome], profile: Profile, steps: int = 4, passes: int = 1,
    precision: str | None = None, keep: Sequence[str] = (),
) -> Validation:  # fmt: skip
    """Run strategies with mpirun on this machine: the seconds of a step, predicted and measured.

    `model` is ``file.py:function``, whose model has weights; `precision` and `keep` are those of `search`.
    Raises `DistIRError` if it cannot be compiled or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = write_bundles(model, outcomes, profile, Path(folder), precision, keep)
        return validate([str(path) for path in paths], profile, steps, passes=passes)


def write_bundles(
    model: str, outcomes: Sequence[Outcome], profile: Profile, folder: Path, precision: str | None = None,
    keep: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """Compile a model under the strategies of outcomes: bundles ``0.dist``, ``1.dist``, ... in `folder`.

    `model` is as for `execute`. Raises `DistIRError` if it cannot be compiled, or a file cannot be written.
    """
    paths = []
    for number, outcome in enumerate(outcomes):
        target = in_precision(_of_samples(model, outcome.samples), precision, keep)
        name = f"{number}: {outcome.strategy}, batch {outcome.samples}"
        compiled = target.compile(strategy=outcome.strategy, profile=profile, name=name)
        plan = compiled if isinstance(compiled, Plan) else compiled.plan
        paths.append(plan.save(folder / f"{number}.dist", ("torch",)))
    return paths


def _target(model: Any, requested: tuple[int, ...]) -> Model | Training:
    """Return the model to search for; its example has a batch larger than any requested one, if it can."""
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        any_batch = "global_batch" in inspect.signature(find_function(str(model))).parameters
        # Twice the largest batch leaves samples for microbatches that are not expanded (`Microbatches`).
        return _call(str(model), 2 * max(requested) if requested and any_batch else None)
    if isinstance(model, (str, Path)):
        return _check_target(read_target(model))
    return _check_target(model if isinstance(model, Training) else classify_input(model))


def _read(
    target: Model | Training, requested: tuple[int, ...], stages: tuple[str, ...], machine: Profile
) -> tuple[Source, tuple[int, ...]]:
    """Return the model, imported with a batch larger than any requested one, and the batches."""
    options = CompileOptions(stages=stages, profile=machine)
    source = _with_batch(target.read(options), requested)
    batch = source.batch
    if batch is not None and requested and max(requested) > batch:
        larger = repeat_example(target, source, 2 * max(requested))
        if larger is not None:
            source = _read_larger(larger, options, batch, 2 * max(requested))
            batch = source.batch
    if batch is None:
        raise DistIRError("the model has no batch that can be split", hint="give an example with several samples")
    if requested and max(requested) > batch:
        raise DistIRError(
            f"a batch of {max(requested)} was requested, the model's example has {batch} samples",
            hint="give a larger example, or a function with a parameter global_batch",
        )
    return source, requested or (batch,)


def _read_larger(target: Model | Training, options: CompileOptions, own: int, samples: int) -> Source:
    """Import a model whose example was repeated. Raises as the import does, with the larger batch as the cause."""
    try:
        return target.read(options)
    except DistIRError as error:
        raise DistIRError(
            f"the model's own example of {own} samples can be imported, one of {samples}, for global_batch "
            f"{samples // 2}, cannot: {error.message}",
            error.where,
            f"let the model take any batch, or search with global_batch up to {own}",
        ) from error


def _with_batch(source: Source, requested: Sequence[int]) -> Source:
    """Return a model with numbers for symbolic sizes; a symbolic batch is larger than any requested one if possible."""
    sizes = {}
    for symbol in symbols_of(source.batch or 0) if requested else ():
        largest = 2 * max(requested)
        sizes[symbol.name] = largest if symbol.high is None else min(largest, symbol.high)
    return source.at(sizes)


def _of_samples(model: str, samples: int) -> Model | Training:
    """Return the model of ``file.py:function`` with an example of this many samples, if it can have one."""
    target = _call(model, samples)
    if "global_batch" in inspect.signature(find_function(model)).parameters:
        return target
    return repeat_example(target, target.read(CompileOptions()), samples) or target


def _call(target: str, batch: int | None) -> Model | Training:
    result, _ = call_target(target, {"global_batch": batch})
    return _check_target(result, target)


def _check_target(target: object, where: str = "") -> Model | Training:
    if isinstance(target, (Model, Training)):
        return target
    found = "a folder" if isinstance(target, SavedBundle) else type(target).__name__
    raise DistIRError(
        f"a search compiles a model many times, found {found}", where,
        "return a model with example inputs, or a Training; text generation takes --prompt and --generate",
    )  # fmt: skip
