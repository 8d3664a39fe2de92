"""Simulation of a bundle, a program, a model, a training, a function or an ONNX file: `dr.simulate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from distir_relax.bundle import read_bundle
from distir_relax.compiler.compile import Plan
from distir_relax.compiler.inputs import (
    Input,
    Model,
    Program,
    SavedBundle,
    call_target,
    classify_input,
    in_precision,
    read_target,
    with_dims,
)
from distir_relax.compiler.larger_example import repeat_example
from distir_relax.compiler.options import CompileOptions, ImportOptions, LayoutOptions
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.source import Source, batch_size
from distir_relax.compiler.training import Training, TrainingStep
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.cost.scaling import scale_profile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.ir import Module
from distir_relax.ir.symbols import at_sizes
from distir_relax.layout import DeviceMesh, evaluate_size, symbols_within
from distir_relax.layout.symbolic_size import Size
from distir_relax.runtime.verification import read_stage
from distir_relax.simulation.simulation import Alternative, Simulation
from distir_relax.simulation.simulator import simulate_module
from distir_relax.strategies.memory_fit import nearest_fit
from distir_relax.strategies.strategy import Strategy, as_strategy
from distir_relax.support.user_function import find_function


def simulate(
    model: Any,
    *,
    profile: Profile | str | Path,
    global_batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    precision: str | None = None,
    keep: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    scale: str | None = None,
    **options: Unpack[LayoutOptions],
) -> Simulation:
    """Predict the run of a model on a machine: makespan, throughput, memory, timeline.

    `model` is a `Plan`, a module of the distributed stage, or the path of a bundle, of a program's text, of an
    ``.onnx`` file, or ``file.py:function``, or the result of such a function: a module, a plan, (model,
    example_inputs), optionally with example_kwargs, or a `Training`. The function receives `strategy` and
    `global_batch` if it has parameters of these names. Without, an example of another batch than `global_batch` has its
    samples repeated, or fewer of them, and a symbolic batch has this value. The batch of a plan or bundle is fixed; of
    another program, `global_batch` says what it is. A model or training that is not compiled yet is distributed by
    `strategy`; if it exceeds the memory of a device, the result's `alternative` is the nearest strategy that fits.
    `profile` is the name or path of a profile, or a `Profile`. The other options are for models that are not compiled
    yet, and `input_shapes` for ONNX files; see `compile`. A `Training` has a `precision` of its own. `dims` are values
    of symbolic sizes by name; others have their typical values.

    `scale` answers what if the machine had other figures: ``network.bandwidth=2x,device.flops=0.5x`` (see
    `scale_profile`). The program is that for `profile`, and the result's `before` is the simulation on it.

    Raises a `DistIRError`: `ProfileError` for the profile, for a `global_batch` that the model cannot have, and what
    reading or compiling the model raises.
    """
    machine = as_profile(profile)
    scaled = None if scale is None else scale_profile(machine, scale)
    strategy = options.pop("strategy", None)
    parameters = {"strategy": strategy, "global_batch": global_batch}
    layout: CompileOptions = {**options, "profile": machine}  # type: ignore[typeddict-item]
    of_import: ImportOptions = {"input_shapes": input_shapes, "precision": precision, "keep": keep}
    if global_batch is not None and global_batch < 1:
        raise DistIRError(f"expected global_batch of at least 1, found {global_batch}")
    loaded = _load(model, parameters, layout, of_import, dims or {})
    if isinstance(loaded.program, Source):
        result = loaded.program.simulate(machine)
    else:
        result = simulate_module(loaded.program, machine)
    if loaded.samples is not None or global_batch is not None:
        result.samples = loaded.samples if global_batch is None else global_batch
    result.strategy = None if strategy is None else str(strategy)
    if scaled is not None:
        before, result = result, simulate_module(result.module, scaled)
        result = replace(result, samples=before.samples, strategy=before.strategy, scale=scale, before=before)
    if not result.fits and isinstance(loaded.program, Source):
        result.alternative = _alternative(result, loaded.program)
    return result


def _alternative(result: Simulation, source: Source) -> Alternative | None:
    """Return the nearest strategy that fits into memory, for a program that does not."""
    if source.strategy is None:
        return None

    def simulate_under(other: Strategy) -> Simulation:
        return source.with_strategy(other).simulate(result.profile)

    return nearest_fit(result, source.strategy, source.is_training, batch_size(result.module), simulate_under)


@dataclass(frozen=True)
class _Loaded:
    """A program of the distributed stage, or an imported model; `samples` is its batch size, if known."""

    program: Module | Source
    samples: int | None = None


def _load(
    model: Any,
    parameters: Mapping[str, Any],
    options: CompileOptions,
    of_import: ImportOptions,
    dims: Mapping[str, int],
) -> _Loaded:
    """Load a model as `simulate` takes it.

    `parameters` are parameters of a user's function by name; those that are None are not passed. `options` are for a
    model that is not compiled yet, `of_import` for one that is not imported, and `dims` values of symbols.
    """
    arguments = {name: value for name, value in parameters.items() if value is not None}
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        return _from_function(str(model), arguments, options, of_import, dims)
    if isinstance(model, (Plan, Module, tuple, Training, TrainingStep)):
        classified = classify_input(model)
    else:
        classified = read_target(model) if isinstance(model, (str, Path)) else Model(model)
    if (strategy := arguments.get("strategy")) is not None:
        if not isinstance(classified, (Model, Training)):
            raise DistIRError(
                f"expected a model to apply the strategy to, found {_NAMES[type(classified)]}",
                hint="strategies are for models that are not compiled yet, and for functions with a strategy parameter",
            )
        options = {**options, "strategy": as_strategy(strategy)}
    elif isinstance(classified, Model) and options.get("mesh") is None:
        # A model without shardings runs on one device.
        options = {**options, "mesh": DeviceMesh((1,), ("device",))}
    where = str(model) if isinstance(model, (str, Path)) else ""
    return _distributed(classified, options, of_import, dims, where, arguments.get("global_batch"))


_NAMES = {Plan: "a plan", Program: "a program", SavedBundle: "a bundle", Model: "a model", Training: "a training"}


def _from_function(
    target: str,
    passed: Mapping[str, Any],
    options: CompileOptions,
    of_import: ImportOptions,
    dims: Mapping[str, int],
) -> _Loaded:
    arguments = dict(passed)
    # The file may register strategy options.
    parameters = inspect.signature(find_function(target)).parameters
    if "strategy" in arguments:
        arguments["strategy"] = as_strategy(arguments["strategy"])
    if "strategy" in arguments and "strategy" not in parameters:
        options = {**options, "strategy": arguments.pop("strategy")}
    result, _ = call_target(target, arguments)
    if options.get("strategy") is not None and not isinstance(result, (Model, Training)):
        raise DistIRError(
            f"expected a model to apply the strategy to, found a function that returns {_NAMES[type(result)]}",
            target,
            "take it as a parameter, strategy, or return a model that is not compiled yet",
        )
    default = parameters.get("global_batch")
    samples = None if default is not None else arguments.get("global_batch")
    loaded = _distributed(result, options, of_import, dims, target, samples)
    is_int = default is not None and isinstance(default.default, int)
    return replace(loaded, samples=default.default) if default is not None and is_int else loaded


def _distributed(
    value: Input,
    options: CompileOptions,
    of_import: ImportOptions,
    dims: Mapping[str, int],
    where: str,
    samples: int | None,
) -> _Loaded:
    """Return an imported model, or the distributed program as its ranks run it; a `Program` is simulated as it is.

    Its batch has this number of `samples`, unless that is None. Raises `ImportModelError` if `options` or `of_import`
    are passed for a program that is distributed already.
    """
    if isinstance(value, Model):
        return _Loaded(_read(with_dims(value, dims), lambda m: m.read(options, **of_import), samples, where))
    if isinstance(value, Training):
        in_precision(value, of_import.get("precision"), of_import.get("keep", ()), where)
        trained: CompileOptions = {**options, "strategy": options.get("strategy") or Strategy()}
        return _Loaded(_read(with_dims(value, dims), lambda t: t.read(trained), samples, where))
    layout = {name: options.get(name) for name in ("shardings", "stages", "mesh")}
    if names := [name for name, setting in {**of_import, **layout}.items() if setting]:
        raise ImportModelError(
            f"{' and '.join(names)} cannot be applied to {_NAMES[type(value)]}, which is distributed already",
            where,
            "give a model instead: a function that returns (model, example_inputs), or an ONNX file",
        )
    if isinstance(value, Program):
        module = at_sizes(value.module, dims)
        _check_batch({batch_size(module) or samples}, samples, value, where)
        return _Loaded(module)
    if isinstance(value, Plan):
        shapes = [item.value.tensor.shape for item in value.imported.module.main.inputs if item.role == "input"]
        module = value.modules["distributed"]
    else:
        bundle = read_bundle(value.path, verify_weights=False)
        shapes = [tensor.shape for tensor in bundle.manifest.inputs]
        module = read_stage(bundle, "distributed")
    first = {shape[0] for shape in shapes if shape}
    symbols = symbols_within(tuple(first)) if samples is not None else frozenset()
    if samples is not None and len(symbols) == 1:
        dims = {**{symbol.name: samples for symbol in symbols}, **dims}
    module = at_sizes(module, dims)
    known = batch_size(module)
    _check_batch({evaluate_size(n, dims) for n in first} if known is None else {known}, samples, value, where)
    return _Loaded(fuse_for_ranks(module), known)


def _check_batch(sizes: Collection[Size | None], samples: int | None, value: Input, where: str) -> None:
    """Raise `DistIRError` unless one of the `sizes` is the number of samples, if that is given."""
    if samples is not None and samples not in sizes:
        own = " or ".join(sorted(map(str, sizes)))
        raise DistIRError(
            f"expected the global_batch of {_NAMES[type(value)]}, {own}, found {samples}",
            where,
            "its batch is fixed: compile it with an example of another one",
        )


_Target = TypeVar("_Target", bound=Model | Training)


def _read(target: _Target, read: Callable[[_Target], Source], samples: int | None, where: str) -> Source:
    """Return a model with a batch of this many `samples`, its own for None. Raises `DistIRError` if it has none."""
    source = read(target)
    batch = source.batch
    first = {i.value.tensor.shape[:1] for i in source.imported.module.main.inputs if i.role == "input"}
    # A dim of one sample is none that can be split.
    if samples is None or batch == samples or (samples == 1 and first == {(1,)}):
        return source
    if symbols := symbols_within((batch or 0,)):
        larger: Source | None = source.at({symbol.name: samples for symbol in symbols})
    else:
        example = repeat_example(target, source, samples)
        larger = None if example is None else read(example)  # type: ignore[arg-type]
    if larger is None or (larger.batch != samples and samples != 1):
        found = "an example without a batch" if batch is None else f"its example's {batch} samples"
        raise DistIRError(
            f"expected a model that can have global_batch {samples}, found one with {found}",
            where,
            "give an example of this many samples, or a function with a parameter global_batch",
        )
    return larger
