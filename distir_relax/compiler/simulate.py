"""How long a program takes on a machine: `dr.simulate` of a bundle, a text, a function or an ONNX file."""

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
from distir_relax.compiler.inputs import Given, Model, Program, Saved, call_target, read_target, what_is
from distir_relax.compiler.options import CompileOptions, LayoutOptions
from distir_relax.compiler.pass_pipeline import as_ranks_run
from distir_relax.compiler.source import Source, samples_of
from distir_relax.compiler.training import Training, TrainingStep
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.ir import Module
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
    **options: Unpack[LayoutOptions],
) -> Simulation:
    """Predict the run of a model on a machine: its makespan, throughput, memory, time line.

    `model` is a `Plan`, a module of the distributed stage, or the path of a bundle, of a program's text, of an
    ``.onnx`` file, or ``file.py:function``, or what such a function returns: a module, a plan, (model,
    example_inputs), with example_kwargs if there are any, or a `Training`. The function is given `strategy` and
    `global_batch` where it has parameters of these names; a model or a training that is still to be compiled is
    distributed by `strategy`; where it does not fit into the memory of a device, the result's `alternative` is the
    nearest strategy with which it would. `profile` is the name of a profile, the path of one, or a `Profile`.
    The other options are for models that are still to be compiled, and `input_shapes` for ONNX files; see `compile`.

    Raises a `DistIRError`: `ProfileError` for the profile, and what reading or compiling the model raises.
    """
    machine = as_profile(profile)
    strategy = options.pop("strategy", None)
    parameters = {"strategy": strategy, "global_batch": global_batch}
    layout: CompileOptions = {**options, "profile": machine}  # type: ignore[typeddict-item]
    loaded = _load(model, parameters, layout, input_shapes)
    if isinstance(loaded.given, Source):
        found = loaded.given.simulate(machine)
    else:
        found = simulate_module(loaded.given, machine)
    if loaded.samples is not None or global_batch is not None:
        found.samples = loaded.samples if global_batch is None else global_batch
    found.strategy = None if strategy is None else str(strategy)
    if not found.fits and isinstance(loaded.given, Source):
        found.alternative = _alternative(found, loaded.given)
    return found


def _alternative(found: Simulation, source: Source) -> Alternative | None:
    """What would fit, of the strategies near that of a program which does not."""
    if source.strategy is None:
        return None

    def again(other: Strategy) -> Simulation:
        return source.under(other).simulate(found.profile)

    return nearest_fit(found, source.strategy, source.is_training, samples_of(found.module), again)


@dataclass(frozen=True)
class _Loaded:
    """A program of the distributed stage, or a model that was read in; how many samples it has, if that is known."""

    given: Module | Source
    samples: int | None = None


def _load(
    model: Any,
    given: Mapping[str, Any],
    options: CompileOptions,
    input_shapes: Mapping[str, Sequence[int]] | None,
) -> _Loaded:
    """A model as `simulate` takes it.

    `given` are parameters for a user's function by name; those that are None are not given. `options` are for what is
    not compiled yet, and `input_shapes` for ONNX files.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        return _from_function(str(model), wanted, options, input_shapes)
    if isinstance(model, (Plan, Module, tuple, Training, TrainingStep)):
        found = what_is(model)
    else:
        found = read_target(model) if isinstance(model, (str, Path)) else Model(model)
    if (strategy := wanted.get("strategy")) is not None:
        if not isinstance(found, (Model, Training)):
            raise DistIRError(
                f"a strategy was given for {_NAMES[type(found)]}, which takes none",
                hint="strategies are for models that are still to be compiled, and functions that take one",
            )
        options = {**options, "strategy": as_strategy(strategy)}
    elif isinstance(found, Model) and options.get("mesh") is None:
        # A model that nobody shards runs on one device.
        options = {**options, "mesh": DeviceMesh((1,), ("device",))}
    return _distributed(found, options, input_shapes, str(model) if isinstance(model, (str, Path)) else "")


_NAMES = {Plan: "a plan", Program: "a program", Saved: "a bundle", Model: "a model", Training: "a training"}


def _from_function(
    target: str, wanted: Mapping[str, Any], options: CompileOptions, input_shapes: Mapping[str, Sequence[int]] | None
) -> _Loaded:
    arguments = dict(wanted)
    if "strategy" in arguments:
        arguments["strategy"] = as_strategy(arguments["strategy"])
    parameters = inspect.signature(find_function(target)).parameters
    if "strategy" in arguments and "strategy" not in parameters:
        options = {**options, "strategy": arguments.pop("strategy")}
    found, _ = call_target(target, arguments)
    if options.get("strategy") is not None and not isinstance(found, (Model, Training)):
        raise DistIRError(
            f"a strategy was given, and the function returns {_NAMES[type(found)]}, which takes none",
            target,
            "take it as a parameter, strategy, or return a model that is still to be compiled",
        )
    default = parameters.get("global_batch")
    loaded = _distributed(found, options, input_shapes, target)
    known = default is not None and isinstance(default.default, int)
    return replace(loaded, samples=default.default) if default is not None and known else loaded


def _distributed(
    given: Given, options: CompileOptions, input_shapes: Mapping[str, Sequence[int]] | None, where: str
) -> _Loaded:
    """A model, read in, or the distributed program as its ranks will run it.

    One that was given as such is simulated as it is. Raises `ImportModelError` where the options are for something that
    is laid out already.
    """
    if isinstance(given, Model):
        return _Loaded(given.read(options, input_shapes))
    if isinstance(given, Training):
        return _Loaded(given.read({**options, "strategy": options.get("strategy") or Strategy()}))
    layout = {"input_shapes": input_shapes, **{name: options.get(name) for name in ("shardings", "stages", "mesh")}}
    if names := [name for name, value in layout.items() if value]:
        raise ImportModelError(
            f"{' and '.join(names)} cannot be applied to {_NAMES[type(given)]}, which is laid out already",
            where,
            "give a model instead: a function that returns (model, example_inputs), or an ONNX file",
        )
    if isinstance(given, Program):
        return _Loaded(given.module)
    if isinstance(given, Plan):
        module = given.modules["distributed"]
        return _Loaded(as_ranks_run(module), samples_of(module))
    return _Loaded(as_ranks_run(read_stage(read_bundle(given.path, verify_weights=False), "distributed")))
