"""How long a program takes on a machine: `dr.simulate` of a bundle, a text, a function or an ONNX file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distir_relax.analysis.simulate import simulate_module
from distir_relax.analysis.simulation import Alternative, Simulation
from distir_relax.bundle import read_bundle
from distir_relax.compiler import Plan
from distir_relax.cost.profile import Profile, as_profile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.given import Given, Model, Program, Saved, call_target, read_target, what_is
from distir_relax.ir import BatchDim, Module
from distir_relax.layout import DeviceMesh, as_mesh
from distir_relax.pipeline import as_ranks_run
from distir_relax.runtime.verification import read_stage
from distir_relax.strategies.fitting import nearest_fit
from distir_relax.strategies.strategy import Strategy, as_strategy
from distir_relax.training import Training, TrainingStep
from distir_relax.user_function import find_function


def simulate(
    model: Any,
    *,
    profile: Profile | str | Path,
    strategy: Strategy | str | None = None,
    stages: Sequence[str] = (),
    global_batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    shardings: Mapping[str, str] | None = None,
    mesh: DeviceMesh | int | Sequence[int] | None = None,
) -> Simulation:
    """Predict the run of a model on a machine: its makespan, throughput, memory, time line.

    `model` is a `Plan`, a module of the distributed stage, or the path of a bundle, of a program's text, of an
    ``.onnx`` file, or ``file.py:function``, or what such a function returns: a module, a plan, (model,
    example_inputs), with example_kwargs if there are any, or a `Training`. The function is given `strategy` and
    `global_batch` where it has parameters of these names; a model or a training that is still to be compiled is
    distributed by `strategy`; where it does not fit into the memory of a device, the result's `alternative` is the
    nearest strategy with which it would. `profile` is the name of a profile, the path of one, or a `Profile`.
    `stages`, `shardings` and `mesh` are for models that are still to be compiled, as `compile` takes them, and
    `input_shapes` for ONNX files.

    Raises a `DistIRError`: `ProfileError` for the profile, and what reading or compiling the model raises.
    """
    machine = as_profile(profile)
    given = {"strategy": strategy, "global_batch": global_batch}
    how = {"input_shapes": input_shapes, "shardings": shardings, "stages": stages, "profile": machine}
    loaded = _load(model, given, {**how, "mesh": None if mesh is None else as_mesh(mesh)})
    found = simulate_module(loaded.module, machine)
    found.samples = global_batch if global_batch is not None else loaded.samples
    found.strategy = None if strategy is None else str(strategy)
    if not found.fits and loaded.compiled is not None:
        found.alternative = _alternative(found, loaded.compiled)
    return found


def _alternative(found: Simulation, plan: Plan) -> Alternative | None:
    """What would fit, of the strategies near that of a plan which does not."""
    if plan.strategy is None:
        return None

    def again(other: Strategy) -> Simulation:
        return simulate_module(as_ranks_run(plan.distributed_by(other)), found.profile)

    batch = _samples(plan.modules["distributed"])
    return nearest_fit(found, plan.strategy, plan.is_training, batch, again)


@dataclass(frozen=True)
class _Loaded:
    """A program of the distributed stage, and the samples of its batch where they are known.

    `compiled` is the plan of a model that was compiled for this, and can be again in another way.
    """

    module: Module
    samples: int | None = None
    compiled: Plan | None = None


def _load(model: Any, given: Mapping[str, Any], layout: dict[str, Any]) -> _Loaded:
    """The distributed program of a model as `simulate` takes it, with all its types.

    `given` are parameters for a user's function by name; those that are None are not given. `layout` are options of
    `compile`, for what is not compiled yet.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, (str, Path)) and ".py:" in str(model):
        return _from_function(str(model), wanted, layout)
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
        layout["strategy"] = as_strategy(strategy)
    elif isinstance(found, Model):
        # A model that nobody splits runs on one device.
        layout["mesh"] = layout["mesh"] or DeviceMesh((1,), ("device",))
    return _distributed(found, layout, str(model) if isinstance(model, (str, Path)) else "")


_NAMES = {Plan: "a plan", Program: "a program", Saved: "a bundle", Model: "a model", Training: "a training"}


def _from_function(target: str, wanted: Mapping[str, Any], layout: Mapping[str, Any]) -> _Loaded:
    options, how = dict(wanted), dict(layout)
    if "strategy" in options:
        options["strategy"] = as_strategy(options["strategy"])
    parameters = inspect.signature(find_function(target)).parameters
    if "strategy" in options and "strategy" not in parameters:
        how["strategy"] = options.pop("strategy")
    found, _ = call_target(target, options)
    if how.get("strategy") is not None and not isinstance(found, (Model, Training)):
        raise DistIRError(
            f"a strategy was given, and the function returns {_NAMES[type(found)]}, which takes none",
            target,
            "take it as a parameter, strategy, or return a model that is still to be compiled",
        )
    default = parameters.get("global_batch")
    loaded = _distributed(found, how, target)
    known = default is not None and isinstance(default.default, int)
    return replace(loaded, samples=default.default) if default is not None and known else loaded


def _distributed(given: Given, layout: Mapping[str, Any], where: str) -> _Loaded:
    """The distributed program, as its ranks will run it, and the samples of its batch, where it is known to have one.

    One that was given as such is simulated as it is. Raises `ImportModelError` where `layout` (options of `compile`) is
    for something that is laid out already.
    """
    is_compiled_here = isinstance(given, (Model, Training))
    options = {name: value for name, value in layout.items() if value}
    profile = options.pop("profile")
    if isinstance(given, Model):
        given = given.compile(**options, profile=profile)
    elif isinstance(given, Training):
        given = given.compile(**{"strategy": Strategy(), **options}, profile=profile).plan
    elif options:
        raise ImportModelError(
            f"{' and '.join(options)} cannot be applied to {_NAMES[type(given)]}, which is laid out already",
            where,
            "give a model instead: a function that returns (model, example_inputs), or an ONNX file",
        )
    if isinstance(given, Program):
        return _Loaded(given.module)
    if isinstance(given, Plan):
        module = given.modules["distributed"]
        return _Loaded(as_ranks_run(module), _samples(module), given if is_compiled_here else None)
    return _Loaded(as_ranks_run(read_stage(read_bundle(given.path, verify_weights=False), "distributed")))


def _samples(module: Module) -> int | None:
    """How many samples the batch has that a strategy found."""
    return next((record.size for record in module.records if isinstance(record, BatchDim)), None)
