"""Configurations of `distir validate`: bundles, or the results of a user's function by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.compiler.compile import Plan, program_bundle
from distir_relax.compiler.inputs import Program, classify_input
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.training import TrainingStep
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.ir import Module
from distir_relax.runtime.verification import read_stage
from distir_relax.strategies.strategy import Strategy
from distir_relax.support.user_function import call_function, find_function


@dataclass(frozen=True)
class Configuration:
    """A program as its ranks run it, and its bundle; `group` is as in `Outcome`."""

    name: str
    module: Module
    bundle: Bundle
    group: str = ""


def read_configurations(
    targets: Sequence[str], compared: Sequence[str], require_signature: Path | None = None
) -> list[Configuration]:
    """Return the configurations of all targets, each a bundle or ``FILE.py:FUNCTION``.

    Those of one group are plans of one name, for equal inputs, whose strategies differ only in the fields `compared`.
    `require_signature` is as for `read_bundle`.
    Raises `ImportModelError` if there is none, and what reading a target raises; `DistIRError` for a field that
    strategies do not have.
    """
    field_names = list(Strategy().values)
    for name in compared:
        if name not in field_names:
            raise DistIRError(f"strategies have no field {name!r}", hint=f"there are {', '.join(field_names)}")
    configurations = [one for target in targets for one in _read(target, compared, require_signature)]
    if not configurations:
        raise ImportModelError("there is no configuration to run", ", ".join(targets))
    return configurations


def _read(target: str, compared: Sequence[str], key: Path | None) -> list[Configuration]:
    if Path(target).is_dir():
        bundle = read_bundle(Path(target), require_signature=key)
        return [Configuration(bundle.manifest.name, fuse_for_ranks(read_stage(bundle, "distributed")), bundle)]
    entries = call_function(find_function(target), target, {})
    if not isinstance(entries, Mapping):
        raise ImportModelError(
            f"expected configurations by name, found {type(entries).__name__}", target,
            "return {'name': plan, 'other': (module, tensors)}")  # fmt: skip
    return [_configuration(str(name), entry, target, compared) for name, entry in entries.items()]


def _configuration(name: str, entry: object, target: str, compared: Sequence[str]) -> Configuration:
    if isinstance(entry, TrainingStep):
        return _of_plan(name, entry.plan, entry.bundle(("torch",)), compared)
    value = classify_input(entry, f"{target}, {name!r}")
    if isinstance(value, Plan):
        return _of_plan(name, value, value.bundle(("torch",)), compared)
    if isinstance(value, Program) and value.tensors is not None:
        return Configuration(name, fuse_for_ranks(value.module), program_bundle(name, value.module, value.tensors))
    raise ImportModelError(
        f"expected a plan, a step of training or (module, tensors) for {name!r}, found {type(entry).__name__}", target
    )


def _of_plan(name: str, plan: Plan, bundle: Bundle, compared: Sequence[str]) -> Configuration:
    return Configuration(name, fuse_for_ranks(plan.modules["distributed"]), bundle, _group(plan, compared))


def _group(plan: Plan, compared: Sequence[str]) -> str:
    """Return the common properties of plans that are compared with each other; "" without any comparison."""
    strategy = plan.source.strategy
    if strategy is None or not compared:
        return ""
    common = [f"{name}={value}" for name, value in strategy.values.items() if name not in compared]
    inputs = [str(item.value.type) for item in plan.modules["global"].main.inputs if item.role == "input"]
    return " ".join([plan.name, *common, *inputs])
