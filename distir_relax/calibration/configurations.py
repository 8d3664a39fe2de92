"""Configurations of `distir validate`: bundles, or the results of a user's function by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.compiler.compile import Plan, program_bundle
from distir_relax.compiler.generation import Generation
from distir_relax.compiler.inputs import Program, classify_input
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.compiler.simulate_generation import request_steps
from distir_relax.compiler.training import TrainingStep
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.runtime.verification import read_stage
from distir_relax.simulation.request_steps import Chunk, StepProgram
from distir_relax.strategies.strategy import Strategy
from distir_relax.support.user_function import call_function, find_function


@dataclass(frozen=True)
class GenerationStep:
    """A step of a language model in which each of `requests` computes `new` tokens after `past` earlier ones.

    One `new` token after many is a decoding step, many after none read a prompt.
    """

    generation: Generation
    requests: int
    new: int
    past: int = 0


@dataclass(frozen=True)
class Configuration:
    """A program as its ranks run it, and its bundle; `group` is as in `Outcome`.

    `kind` is ``training``, ``inference``, ``prefill`` or ``decode``, `dtype` that of the weights if they are quantized,
    else of the computation, and `strategy` the degrees of parallelism. `step` are the `requests`, `new` and `past`
    tokens of a step of text generation, None for other programs.
    """

    name: str
    program: StepProgram
    bundle: Bundle
    group: str = ""
    kind: str = "inference"
    strategy: str = ""
    step: tuple[int, int, int] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.bundle.manifest.mesh.size

    @property
    def dtype(self) -> str:
        """The dtype of quantized weights, else that of the computation: the narrowest of the program's results."""
        stored = {tensor.dtype for tensor in self.bundle.manifest.weights}
        quantized = next((name for dtype, name in _QUANTIZED.items() if dtype in stored), None)
        if quantized is not None:
            return quantized
        results = {v.placed.dtype for f in self.program.module.functions for op in f.ops for v in op.results}
        return next((dtype for dtype in ("bfloat16", "float16") if dtype in results), "float32")


_QUANTIZED = {"uint8": "int4", "int8": "int8"}


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
        kind = "training" if bundle.manifest.training is not None else "inference"
        module = fuse_for_ranks(read_stage(bundle, "distributed"))
        return [Configuration(bundle.manifest.name, StepProgram(module), bundle, kind=kind)]
    entries = call_function(find_function(target), target, {})
    if not isinstance(entries, Mapping):
        raise ImportModelError(
            f"expected configurations by name, found {type(entries).__name__}", target,
            "return {'name': plan, 'other': (module, tensors)}")  # fmt: skip
    return [_configuration(str(name), entry, target, compared) for name, entry in entries.items()]


def _configuration(name: str, entry: object, target: str, compared: Sequence[str]) -> Configuration:
    if isinstance(entry, TrainingStep):
        return _of_plan(name, entry.plan, entry.bundle(("torch",)), compared)
    if isinstance(entry, GenerationStep):
        return _of_generation(name, entry)
    value = classify_input(entry, f"{target}, {name!r}")
    if isinstance(value, Plan):
        return _of_plan(name, value, value.bundle(("torch",)), compared)
    if isinstance(value, Program) and value.tensors is not None:
        program = StepProgram(fuse_for_ranks(value.module))
        return Configuration(name, program, program_bundle(name, value.module, value.tensors))
    raise ImportModelError(
        f"expected a plan, a step of training or of generation, or (module, tensors) for {name!r}, found "
        f"{type(entry).__name__}",
        target,
    )


def _of_plan(name: str, plan: Plan, bundle: Bundle, compared: Sequence[str]) -> Configuration:
    kind = "training" if bundle.manifest.training is not None else "inference"
    program = StepProgram(fuse_for_ranks(plan.modules["distributed"]))
    return Configuration(name, program, bundle, _group(plan, compared), kind, _degrees(plan))


def _of_generation(name: str, entry: GenerationStep) -> Configuration:
    plan = entry.generation.plan
    bundle = plan.bundle(("torch",))
    steps = request_steps(plan.modules["distributed"], bundle.manifest)
    program = steps.program({Chunk(entry.past, entry.new, 1): entry.requests})
    return Configuration(
        name, program, bundle, kind="decode" if entry.new == 1 else "prefill", strategy=_degrees(plan),
        step=(entry.requests, entry.new, entry.past),
    )  # fmt: skip


def _degrees(plan: Plan) -> str:
    """Return the degrees of parallelism above 1 of a plan's strategy: ``data 2``; empty without a strategy."""
    strategy = plan.source.strategy
    if strategy is None:
        return ""
    degrees = {"data": strategy.data, "tensor": strategy.tensor, "pipeline": strategy.pipeline}
    return ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"


def _group(plan: Plan, compared: Sequence[str]) -> str:
    """Return the common properties of plans that are compared with each other; "" without any comparison."""
    strategy = plan.source.strategy
    if strategy is None or not compared:
        return ""
    common = [f"{name}={value}" for name, value in strategy.values.items() if name not in compared]
    inputs = [str(item.value.type) for item in plan.modules["global"].main.inputs if item.role == "input"]
    return " ".join([plan.name, *common, *inputs])
