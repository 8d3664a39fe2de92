"""`dr.simulate`: whatever a user has, a bundle, a program's text, a function or an ONNX file, run on a machine's profile."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distir_relax.analysis.profile import Profile, load_profile
from distir_relax.analysis.simulate import simulate_module
from distir_relax.analysis.simulation import Simulation
from distir_relax.analysis.types import infer_types
from distir_relax.bundle import read_bundle
from distir_relax.compiler import Plan, compile
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.ir import DeviceMesh, Module, parse, verify
from distir_relax.lowering import as_ranks_run
from distir_relax.ops import check
from distir_relax.transforms.strategy import Strategy
from distir_relax.user_function import call_function, find_function


def simulate(
    model: Any,
    *,
    profile: Profile | str | Path,
    strategy: Strategy | str | None = None,
    global_batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    shardings: Mapping[str, str] | None = None,
    mesh: DeviceMesh | None = None,
) -> Simulation:
    """Predict the run of a model on a machine: its makespan, throughput, memory, time line.

    `model` is a `Plan`, a module of the distributed stage, or the path of a bundle, of a program's text, of an
    ``.onnx`` file, or ``file.py:function``. The function returns a module, a plan, or (model, example_inputs); it is
    given `strategy` (D/T/P/K) and `global_batch` where it has parameters of these names. `profile` is the name of a
    profile, the path of one, or a `Profile`. `input_shapes`, `shardings` and `mesh` are for ONNX files, as for
    `compile`.

    Raises a `DistIRError`: `ProfileError` for the profile, and what reading or compiling the model raises.
    """
    machine = profile if isinstance(profile, Profile) else load_profile(profile)
    given = {"strategy": strategy, "global_batch": global_batch}
    module, samples = load_module(model, given, input_shapes, shardings, mesh)
    found = simulate_module(module, machine)
    found.samples = global_batch if global_batch is not None else samples
    return found


def load_module(
    model: Any,
    given: Mapping[str, Any],
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    shardings: Mapping[str, str] | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Module, int | None]:
    """The distributed program of a model as `simulate` takes it, with all its types, and its number of samples.

    `given` are parameters for a user's function by name; those that are None are not given. The number of samples is
    None where nothing says it.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, Plan):
        return _without(wanted, as_ranks_run(model.modules["distributed"]), "a plan")
    if isinstance(model, Module):
        return _without(wanted, infer_types(model), "a module")
    text = str(model)
    if text.endswith(".onnx") or not isinstance(model, (str, Path)):
        chosen = mesh or DeviceMesh((1,), ("device",))
        plan = compile(model, input_shapes=input_shapes, shardings=shardings, mesh=chosen)
        return _without(wanted, as_ranks_run(plan.modules["distributed"]), "an ONNX model")
    path = Path(text)
    if path.is_dir():
        program = parse(read_bundle(path, verify_weights=False).stage("distributed"), str(path / "distir.txt"))
        return _without(wanted, as_ranks_run(program), "a bundle")
    if ".py:" in text:
        return _from_function(text, wanted)
    if not path.is_file():
        raise ImportModelError(
            "there is no such file", text, "give a bundle, a program's text, an .onnx file, or file.py:function"
        )
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ImportModelError(f"not a program's text: {error}", text) from None
    module = infer_types(parse(source, text))
    # A person may have written it.
    verify(module, check)
    return _without(wanted, module, "a program's text")


def _from_function(target: str, wanted: Mapping[str, Any]) -> tuple[Module, int | None]:
    function = find_function(target)
    options = dict(wanted)
    default = inspect.signature(function).parameters.get("global_batch")
    samples = default.default if default is not None and isinstance(default.default, int) else None
    if "strategy" in options and not isinstance(options["strategy"], Strategy):
        options["strategy"] = Strategy.parse(str(options["strategy"]))
    made = call_function(function, target, options, required=("strategy",))
    if isinstance(made, Plan):
        return as_ranks_run(made.modules["distributed"]), samples
    if isinstance(made, tuple) and made and isinstance(made[0], Module):
        return infer_types(made[0]), samples
    if isinstance(made, Module):
        return infer_types(made), samples
    if isinstance(made, tuple) and len(made) in (2, 3):
        kwargs = made[2] if len(made) == 3 else None
        inputs = made[1] if isinstance(made[1], (tuple, list)) else (made[1],)
        plan = compile(made[0], tuple(inputs), example_kwargs=kwargs)
        return as_ranks_run(plan.modules["distributed"]), samples
    raise ImportModelError(
        f"expected a module, a Plan or a tuple (model, example_inputs), found {type(made).__name__}", target
    )


def _without(wanted: Mapping[str, Any], module: Module, what: str) -> tuple[Module, None]:
    if wanted.get("strategy") is not None:
        raise DistIRError(
            f"a strategy was given for {what}, which is distributed already",
            hint="strategies are for functions that take one: file.py:function",
        )
    return module, None
