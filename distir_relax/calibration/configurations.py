"""The configurations that `distir validate` runs: what a user's function returns by name, or bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.compiler.compile import Plan, program_bundle
from distir_relax.compiler.inputs import Program, what_is
from distir_relax.compiler.pass_pipeline import as_ranks_run
from distir_relax.compiler.training import TrainingStep
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.ir import Module
from distir_relax.runtime.verification import read_stage
from distir_relax.strategies.strategy import Strategy
from distir_relax.support.user_function import call_function, find_function


@dataclass(frozen=True)
class Configuration:
    """A program as its ranks run it, and the bundle that they run; `group` is as in `Outcome`."""

    name: str
    module: Module
    bundle: Bundle
    group: str = ""


def read_configurations(targets: Sequence[str], compared: Sequence[str]) -> list[Configuration]:
    """The configurations of all targets, each a bundle or ``FILE.py:FUNCTION``.

    Those of one group are plans of one name, for equal inputs, whose strategies differ in the fields `compared` alone.
    Raises `ImportModelError` where there is none, and what reading a target raises; `DistIRError` for a field that
    strategies do not have.
    """
    known = [field.name for field in fields(Strategy)]
    for name in compared:
        if name not in known:
            raise DistIRError(f"strategies have no field {name!r}", hint=f"there are {', '.join(known)}")
    found = [configuration for target in targets for configuration in _read(target, compared)]
    if not found:
        raise ImportModelError("there is no configuration to run", ", ".join(targets))
    return found


def _read(target: str, compared: Sequence[str]) -> list[Configuration]:
    if Path(target).is_dir():
        bundle = read_bundle(Path(target))
        return [Configuration(bundle.manifest.name, as_ranks_run(read_stage(bundle, "distributed")), bundle)]
    made = call_function(find_function(target), target, {})
    if not isinstance(made, Mapping):
        raise ImportModelError(
            f"expected configurations by name, found {type(made).__name__}", target,
            "return {'name': plan, 'other': (module, tensors)}")  # fmt: skip
    return [_configuration(str(name), entry, target, compared) for name, entry in made.items()]


def _configuration(name: str, entry: object, target: str, compared: Sequence[str]) -> Configuration:
    if isinstance(entry, TrainingStep):
        return _of_plan(name, entry.plan, entry.bundle(("torch",)), compared)
    found = what_is(entry, f"{target}, {name!r}")
    if isinstance(found, Plan):
        return _of_plan(name, found, found.bundle(("torch",)), compared)
    if isinstance(found, Program) and found.tensors is not None:
        return Configuration(name, as_ranks_run(found.module), program_bundle(name, found.module, found.tensors))
    raise ImportModelError(
        f"expected a plan, a step of training or (module, tensors) for {name!r}, found {type(entry).__name__}", target
    )


def _of_plan(name: str, plan: Plan, bundle: Bundle, compared: Sequence[str]) -> Configuration:
    return Configuration(name, as_ranks_run(plan.modules["distributed"]), bundle, _group(plan, compared))


def _group(plan: Plan, compared: Sequence[str]) -> str:
    """What a plan has in common with those that it is compared with; "" where there is nothing to compare."""
    strategy = plan.source.strategy
    if strategy is None or not compared:
        return ""
    alike = [f"{name}={value}" for name, value in asdict(strategy).items() if name not in compared]
    inputs = [str(item.value.type) for item in plan.modules["global"].main.inputs if item.role == "input"]
    return " ".join([plan.name, *alike, *inputs])
