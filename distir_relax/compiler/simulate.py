"""Simulation of a bundle, a program, a model, a training, a function or an ONNX file: `dr.simulate`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from distir_relax.analysis.simulation import Alternative, Simulation
from distir_relax.analysis.simulator import simulate_module
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
from distir_relax.compiler.options import CompileOptions, ImportOptions, LayoutOptions
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.source import Source, batch_size
from distir_relax.compiler.training import Training, TrainingStep
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.cost.scaling import scale_profile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.ir import Module
from distir_relax.ir.symbols import at_sizes
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.verification import read_stage
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
    `global_batch` if it has parameters of these names. A model or training that is not compiled yet is distributed by
    `strategy`; if it exceeds the memory of a device, the result's `alternative` is the nearest strategy that fits.
    `profile` is the name or path of a profile, or a `Profile`. The other options are for models that are not compiled
    yet, and `input_shapes` for ONNX files; see `compile`. A `Training` has a `precision` of its own. `dims` are values
    of symbolic sizes by name; others have their typical values.

    `scale` answers what if the machine had other figures: ``network.bandwidth=2x,device.flops=0.5x`` (see
    `scale_profile`). The program is that for `profile`, and the result's `before` is the simulation on it.

    Raises a `DistIRError`: `ProfileError` for the profile, and what reading or compiling the model raises.
    """
    machine = as_profile(profile)
    scaled = None if scale is None else scale_profile(machine, scale)
    strategy = options.pop("strategy", None)
    parameters = {"strategy": strategy, "global_batch": global_batch}
    layout: CompileOptions = {**options, "profile": machine}  # type: ignore[typeddict-item]
    of_import: ImportOptions = {"input_shapes": input_shapes, "precision": precision, "keep": keep}
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
    return _distributed(classified, options, of_import, dims, where)


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
    loaded = _distributed(result, options, of_import, dims, target)
    is_int = default is not None and isinstance(default.default, int)
    return replace(loaded, samples=default.default) if default is not None and is_int else loaded


def _distributed(
    value: Input,
    options: CompileOptions,
    of_import: ImportOptions,
    dims: Mapping[str, int],
    where: str,
) -> _Loaded:
    """Return an imported model, or the distributed program as its ranks run it; a `Program` is simulated as it is.

    Raises `ImportModelError` if `options` or `of_import` are passed for a program that is distributed already.
    """
    if isinstance(value, Model):
        return _Loaded(with_dims(value, dims).read(options, **of_import))
    if isinstance(value, Training):
        in_precision(value, of_import.get("precision"), of_import.get("keep", ()), where)
        return _Loaded(with_dims(value, dims).read({**options, "strategy": options.get("strategy") or Strategy()}))
    layout = {name: options.get(name) for name in ("shardings", "stages", "mesh")}
    if names := [name for name, setting in {**of_import, **layout}.items() if setting]:
        raise ImportModelError(
            f"{' and '.join(names)} cannot be applied to {_NAMES[type(value)]}, which is distributed already",
            where,
            "give a model instead: a function that returns (model, example_inputs), or an ONNX file",
        )
    if isinstance(value, Program):
        return _Loaded(at_sizes(value.module, dims))
    if isinstance(value, Plan):
        module = at_sizes(value.modules["distributed"], dims)
        return _Loaded(fuse_for_ranks(module), batch_size(module))
    module = read_stage(read_bundle(value.path, verify_weights=False), "distributed")
    return _Loaded(fuse_for_ranks(at_sizes(module, dims)))
