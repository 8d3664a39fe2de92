"""Compile the target of `distir compile`: a user's function, an ONNX file, or a folder of a pretrained model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distir_relax.bundle import OnWritten, model_files, write_bundle
from distir_relax.cli.options import flag_of
from distir_relax.compiler.compile import Plan, program_bundle
from distir_relax.compiler.generation import compile_generation
from distir_relax.compiler.inputs import Model, Program, SavedBundle, call_target, is_onnx
from distir_relax.compiler.origin import from_files
from distir_relax.compiler.pass_manager import Observer
from distir_relax.compiler.training import Training
from distir_relax.errors import ImportModelError, PlacementError
from distir_relax.frontends.pretrained import checkpoint_dtype, is_pretrained, read_pretrained
from distir_relax.frontends.pretrained_language_model import is_gguf
from distir_relax.ir import parse
from distir_relax.proof import Proof
from distir_relax.simulation.footprint import Footprint, footprint
from distir_relax.strategies.strategy import as_strategy
from distir_relax.support.precisions import PRECISIONS
from distir_relax.support.user_function import find_function


@dataclass(frozen=True)
class Target:
    """Target of `distir compile` and its options: `options` are the keyword arguments of `compile` that were passed.

    `auto`, `train` and `ranks` are command-line options; `pretrained` are the options for a folder of a model, and
    `generation` those of `compile_generation`, with `generate` whether it is called.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    auto: bool = False
    train: bool = False
    ranks: int | None = None
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    def flags(self, names: Collection[str]) -> list[str]:
        """Return the flags of the named options that were passed."""
        values = {
            **self.options, "auto": self.auto or None, "train": self.train or None, "ranks": self.ranks,
            **self.pretrained, **self.generation,
        }  # fmt: skip
        return [flag_of(name) for name in names if values.get(name) is not None]

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of `compile`. Raise `PlacementError` for mutually exclusive options."""
        if self.auto and "shardings" in self.options:
            raise PlacementError("expected either --auto or --shard", hint="--auto keeps the annotations in the model")
        return {**self.options, **({"shardings": "auto"} if self.auto else {})}


@dataclass(frozen=True)
class Compiled:
    """The footprint of each rank of a plan, and its proof if it was checked.

    `precision` is a line about that of a model from files if none was given.
    """

    footprint: Footprint
    proof: Proof | None
    precision: str | None = None


def compile_target(
    target: Target, output: Path, backends: Sequence[str], observers: Sequence[Observer] = (),
    on_written: OnWritten | None = None,
) -> Compiled:  # fmt: skip
    """Compile, and write the bundle.

    `observers` see the program after each pass, and `on_written` the progress of writing weights.

    Raises `ImportModelError` if the file or the function is missing, the function raises or returns something else,
    and the errors of compiling and writing.
    """
    if target.generation.get("generate"):
        return _compile_generation(target, output, backends, observers, on_written)
    if unused := target.flags(target.generation):
        raise ImportModelError(f"{unused[0]} is only for language models", target.name, "give --generate")
    if is_gguf(target.name):
        raise ImportModelError("a GGUF file is compiled to generate text", target.name, "give --generate")
    if is_onnx(target.name):
        model = _onnx(target)
    elif is_pretrained(target.name):
        model = _pretrained(target)
    else:
        returned, function = _call(target)
        if isinstance(returned, Program) and returned.tensors is not None:
            _reject(target, "a distributed program", {*target.options, "auto"} - {"name"})
            name = str(target.options.get("name") or function.__name__)
            bundle = program_bundle(name, returned.module, returned.tensors)
            write_bundle(bundle, output, overwrite=True)
            return Compiled(footprint(returned.module, parse(bundle.stage("ranked"))), None)
        if isinstance(returned, Training):
            return _compile_training(returned, target, output, backends, observers)
        if target.train and not isinstance(returned, Plan):
            raise ImportModelError(
                f"expected a training, found {_NAMES[type(returned)]}", target.name,
                "return dr.Training(model, loss, optimizer=..., example_batch=(inputs, targets))")  # fmt: skip
        if isinstance(returned, Plan):
            taken = inspect.signature(function).parameters.keys() - {"shardings"}
            _reject(target, "a finished Plan", {*target.options, "auto"} - taken)
            return _save(returned, output, backends, on_written)
        if not isinstance(returned, Model):
            raise ImportModelError(
                "expected a program with its tensors, found only a program", target.name, "return module, tensors"
            )
        model = returned
    keywords = target.keywords()
    if is_pretrained(target.name) and not keywords.keys() & {"strategy", "mesh", "shardings"}:
        # As with --generate.
        keywords["strategy"] = "1/1/1/1"
    plan = model.compile(**keywords, observers=observers)
    if not is_pretrained(target.name):
        return _save(plan, output, backends, on_written)
    plan = replace(plan, imported=from_files(plan.imported, model_files(Path(target.name))))
    line = None
    if target.options.get("precision") is None:
        loaded = str(model.model.dtype).removeprefix("torch.")
        names = {dtype: name for name, dtype in PRECISIONS.items()}
        line = _precision_line(names.get(loaded, loaded), checkpoint_dtype(Path(target.name)))
    return replace(_save(plan, output, backends, on_written), precision=line)


def _precision_line(precision: str | None, stored: str | None) -> str:
    return f"precision {precision} for weights of {stored}; --precision chooses another"


_NAMES = {Model: "a model", Program: "a program", SavedBundle: "a bundle"}


def _call(target: Target) -> tuple[Any, Callable[..., Any]]:
    """Call the function of ``FILE.py:FUNCTION``; return its result and the function."""
    if Path(target.name).is_dir():
        raise ImportModelError(
            "expected config.json of a model in the folder, found none", target.name, "give FILE.py:FUNCTION, FILE.onnx"
            " or a folder written by save_pretrained; run a compiled bundle with distir run",
        )  # fmt: skip
    if unused := target.flags(target.pretrained):
        raise ImportModelError(f"{unused[0]} is only for folders written by save_pretrained", target.name)
    if "input_shapes" in target.options:
        raise ImportModelError("--input-shape is for ONNX files", target.name, "the function's example has the shapes")
    # The file may register strategy options.
    find_function(target.name)
    strategy = target.options.get("strategy")
    arguments = {
        "ranks": target.ranks,
        "tail": target.options.get("tail"),
        "name": target.options.get("name"),
        "strategy": None if strategy is None else as_strategy(strategy),
    }
    return call_target(target.name, arguments, required=("ranks",))


def _reject(target: Target, kind: str, names: Collection[str]) -> None:
    """Raise `ImportModelError` for options that cannot be applied to the function's result."""
    if unused := target.flags([name for name in (*target.options, "auto") if name in names]):
        raise ImportModelError(
            f"the function returns {kind}, to which {', '.join(unused)} cannot be applied", target.name,
            "return (model, example_inputs) instead, or take the option as a parameter")  # fmt: skip


def _pretrained(target: Target) -> Model:
    if unused := target.flags(("ranks", "input_shapes", "train")):
        raise ImportModelError(
            f"{unused[0]} cannot be applied to a folder of a model", target.name,
            "--batch and --sequence set its shapes; to train it, write a function that returns dr.Training(...)",
        )  # fmt: skip
    task, batch, sequence = (target.pretrained.get(key) for key in ("task", "batch", "sequence"))
    pretrained = read_pretrained(target.name, task, batch, sequence, target.options.get("dims"))
    return Model(pretrained.model, (), pretrained.inputs, pretrained.dynamic_shapes or None)


def _compile_generation(
    target: Target, output: Path, backends: Sequence[str], observers: Sequence[Observer],
    on_written: OnWritten | None,
) -> Compiled:  # fmt: skip
    if ":" in Path(target.name).name or is_onnx(target.name):
        raise ImportModelError(
            "--generate is for a folder of a model, or a GGUF file", target.name,
            "in a function, return dr.compile_generation(model, ...).plan",
        )  # fmt: skip
    others = (*target.pretrained, "ranks", "train", "input_shapes", "dims", "constants", "checkpoint", "check_import")
    if unused := target.flags(others):
        raise ImportModelError(
            f"{unused[0]} cannot be applied with --generate", target.name,
            "--max-length and --max-batch bound the sizes; others are any",
        )  # fmt: skip
    sizes = {name: target.generation[name] for name in ("max_length", "max_batch", "max_source")}
    generation = compile_generation(target.name, **sizes, **target.keywords(), observers=observers)
    plan = generation.plan
    plan.save(output, backends, weights=target.generation["weights"] or "refer", on_written=on_written)
    line = None
    if target.options.get("precision") is None:
        line = _precision_line(generation.precision, generation.stored)
    return Compiled(plan.footprint, plan.proof, line)


def _onnx(target: Target) -> Model:
    if target.ranks is not None:
        raise ImportModelError(
            f"--ranks {target.ranks} is only for functions", target.name, f"give --mesh {target.ranks} and --shard"
        )
    return Model(target.name)


def _compile_training(
    training: Training, target: Target, output: Path, backends: Sequence[str], observers: Sequence[Observer]
) -> Compiled:
    if not target.train:
        raise ImportModelError("the function returns a training", target.name, "give --train")
    if unused := target.flags(("check_import", "checkpoint", "constants", "keep")):
        raise ImportModelError(f"{unused[0]} cannot be applied to a training", target.name)
    step = training.compile(**target.keywords(), observers=observers)
    step.save(output, backends=backends)
    return Compiled(step.plan.footprint, step.plan.proof)


def _save(plan: Plan, output: Path, backends: Sequence[str], on_written: OnWritten | None) -> Compiled:
    plan.save(output, backends=backends, on_written=on_written)
    return Compiled(plan.footprint, plan.proof)
