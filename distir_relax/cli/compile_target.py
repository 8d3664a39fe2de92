"""`distir compile`: compile what the user's function returns, an ONNX file, or a folder of a pretrained model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.analysis.footprint import Footprint, footprint
from distir_relax.bundle import write_bundle
from distir_relax.compiler.compile import Plan, program_bundle
from distir_relax.compiler.inputs import Model, Program, Saved, call_target, is_onnx
from distir_relax.compiler.pass_pipeline import Observer
from distir_relax.compiler.training import Training
from distir_relax.errors import ImportModelError, PlacementError
from distir_relax.frontends.pretrained import is_pretrained, read_pretrained
from distir_relax.ir import parse
from distir_relax.layout import DeviceMesh
from distir_relax.strategies.strategy import as_strategy

# Options that say how a model is compiled, of no use to what is compiled already; the first three say what is split.
_OF_PRETRAINED = ("task", "batch", "sequence")
_OF_COMPILATION = (
    *("mesh", "axes", "auto", "strategy", "stages", "profile", "memory"),
    *("dump", "verify", "outline", "check_import", "checkpoint", "fast_math"),
)


@dataclass(frozen=True)
class CompileOptions:
    """What `distir compile` is asked. `mesh` is text such as `2x3`, `axes` such as `dp,tp`, both for `shardings`."""

    target: str
    output: Path
    tail: str | None = None
    backends: tuple[str, ...] = ("torch", "tvm")
    shardings: tuple[str, ...] = ()
    mesh: str | None = None
    axes: str | None = None
    ranks: int | None = None
    name: str | None = None
    input_shapes: tuple[str, ...] = ()
    dump: Path | None = None
    verify: bool | None = None
    outline: bool | None = None
    check_import: bool | None = None
    checkpoint: Path | None = None
    strategy: str | None = None
    stages: tuple[str, ...] | None = None
    profile: str | None = None
    train: bool = False
    auto: bool | None = None
    memory: float | None = None
    task: str | None = None
    batch: int | None = None
    sequence: int | None = None
    fast_math: bool | None = None


def compile_target(options: CompileOptions, observers: Sequence[Observer] = ()) -> Footprint:
    """Compile and write the bundle; what it asks of each rank. `observers` look on while passes run.

    Raises ImportModelError when the file or the function is missing, raises, or returns something else, and whatever
    compiling and writing raise.
    """
    shardings = read_shardings(options.shardings)
    if is_onnx(options.target):
        return _compile_onnx(shardings, options, observers)
    if is_pretrained(options.target):
        return _compile_pretrained(shardings, options, observers)
    if Path(options.target).is_dir():
        raise ImportModelError(
            "the folder has no config.json of a model", options.target, "give FILE.py:FUNCTION, FILE.onnx, or a folder "
            "that save_pretrained wrote; a bundle is compiled already: distir run",
        )  # fmt: skip
    if unused := _given(options, _OF_PRETRAINED):
        raise ImportModelError(f"{unused[0]} is for a folder that save_pretrained wrote", options.target)
    if options.input_shapes:
        raise ImportModelError(
            "--input-shape is for ONNX files", options.target, "the function's example has the shapes"
        )
    strategy = None if options.strategy is None else as_strategy(options.strategy)
    offered = {"ranks": options.ranks, "tail": options.tail, "name": options.name, "strategy": strategy}
    made, function = call_target(options.target, offered, required=("ranks",))
    if isinstance(made, Program) and made.tensors is not None:
        _reject(options, "a distributed program", ("tail", *_OF_COMPILATION), bool(shardings))
        bundle = program_bundle(options.name or function.__name__, made.module, made.tensors)
        write_bundle(bundle, options.output, overwrite=True)
        return footprint(made.module, parse(bundle.stage("ranked")))
    if isinstance(made, Training):
        return _compile_training(made, shardings, options, observers)
    if options.train and not isinstance(made, Plan):
        raise ImportModelError(
            f"expected what is to be trained, found {_NAMES[type(made)]}", options.target,
            "return dr.Training(model, loss, optimizer=..., example_batch=(inputs, targets))")  # fmt: skip
    if isinstance(made, Plan):
        taken = inspect.signature(function).parameters
        finished = [n for n in (*_OF_COMPILATION, "tail", "name") if n not in taken]
        _reject(options, "a finished Plan", finished, bool(shardings))
        return _saved(made, options)
    if not isinstance(made, Model):
        raise ImportModelError(
            "expected a program with its tensors, found a program alone", options.target, "return module, tensors"
        )
    return _saved(made.compile(**_common(shardings, options), observers=observers), options)


def read_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs by name from ``x=1,3,224,224``. Raises `ImportModelError` for other texts."""
    return dict(map(_input_shape, texts))


def read_shardings(texts: Sequence[str]) -> dict[str, str]:
    """Placements by pattern from ``layer.*.weight=S[0]``. Raises `PlacementError` for other texts."""
    return dict(map(_sharding, texts))


def read_mesh(shape: str | None, axes: str | None) -> DeviceMesh | None:
    """The mesh of ``2x3`` with axes ``dp,tp``, None where neither is given. Raises `PlacementError` for other texts."""
    return None if shape is None and axes is None else _read_mesh(shape, axes)


def _reject(options: CompileOptions, what: str, names: Sequence[str], shardings: bool) -> None:
    """Raise `ImportModelError` when options are given that cannot be applied to what the function returns."""
    unused = ["--shard"] * shardings + _given(options, names)
    if unused:
        raise ImportModelError(
            f"the function returns {what}, to which {', '.join(unused)} cannot be applied", options.target,
            "return (model, example_inputs) instead, or take the option as a parameter")  # fmt: skip


def _given(options: CompileOptions, names: Sequence[str]) -> list[str]:
    """Those of some options that were given, as the command line has them."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]


def _compile_pretrained(shardings: dict[str, str], options: CompileOptions, observers: Sequence[Observer]) -> Footprint:
    unused = [
        *_given(options, ("ranks",)),
        *(["--input-shape"] * bool(options.input_shapes)),
        *(["--train"] * options.train),
    ]
    if unused:
        raise ImportModelError(
            f"{unused[0]} cannot be applied to a folder of a model", options.target,
            "--batch and --sequence say its shapes; to train it, write a function that returns dr.Training(...)",
        )  # fmt: skip
    found = read_pretrained(options.target, options.task, options.batch, options.sequence)
    made = Model(found.model, (), found.inputs)
    return _saved(made.compile(**_common(shardings, options), observers=observers), options)


def _compile_onnx(shardings: dict[str, str], options: CompileOptions, observers: Sequence[Observer]) -> Footprint:
    if options.ranks is not None:
        raise ImportModelError(
            f"--ranks {options.ranks} is for functions", options.target, f"give --mesh {options.ranks} and --shard"
        )
    shapes = read_shapes(options.input_shapes)
    plan = Model(options.target).compile(input_shapes=shapes, **_common(shardings, options), observers=observers)
    return _saved(plan, options)


_NAMES = {Model: "a model", Program: "a program", Saved: "a bundle"}


def _compile_training(
    made: Training, shardings: dict[str, str], options: CompileOptions, observers: Sequence[Observer]
) -> Footprint:
    if not options.train:
        raise ImportModelError("the function returns a training", options.target, "give --train")
    unused = [name for name in ("check_import", "checkpoint") if getattr(options, name) is not None]
    if unused:
        raise ImportModelError(f"{unused[0].replace('_', '-')} cannot be applied to a training", options.target)
    step = made.compile(**_common(shardings, options), observers=observers)
    step.save(options.output, backends=options.backends)
    return step.plan.footprint


def _saved(plan: Plan, options: CompileOptions) -> Footprint:
    plan.save(options.output, backends=options.backends)
    return plan.footprint


def _common(shardings: dict[str, str], options: CompileOptions) -> dict[str, Any]:
    """The arguments of `compile` that any model takes, where they were given.

    Raises `PlacementError` for options that cannot both be.
    """

    given: dict[str, Any] = {}
    if options.auto and shardings:
        raise PlacementError(
            "expected either --auto or --shard", hint="marks in the model stay as they are with --auto"
        )
    if options.auto:
        given["shardings"] = "auto"
    if shardings:
        given["shardings"] = shardings
    if options.mesh is not None or options.axes is not None:
        given["mesh"] = read_mesh(options.mesh, options.axes)
    if options.tail is not None:
        given["tail"] = options.tail
    for option in ("name", *_OF_COMPILATION[3:]):
        if getattr(options, option) is not None:
            given[option] = getattr(options, option)
    return given


def _input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, shape = text.rpartition("=")
    sizes = shape.split(",") if shape else []
    if not name or not equals or not all(size.strip().isdecimal() for size in sizes):
        raise ImportModelError(
            "expected NAME=SIZES", f"--input-shape {text}", "for example: --input-shape x=1,3,224,224"
        )
    return name, tuple(map(int, sizes))


def _sharding(text: str) -> tuple[str, str]:
    pattern, equals, placement = text.partition("=")
    if not pattern or not equals or not placement:
        raise PlacementError(
            "expected PATTERN=PLACEMENT", f"--shard {text}", "for example: --shard 'layer.*.weight=S[0]'"
        )
    return pattern, placement


def _read_mesh(shape_text: str | None, axes_text: str | None) -> DeviceMesh:
    sizes = (shape_text or "").lower().split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise PlacementError(
            f"expected sizes such as 2 or 2x3, found {shape_text!r}", "--mesh", "--axes names the axes of --mesh"
        )
    shape = tuple(map(int, sizes))
    default = ("tp",) if len(shape) == 1 else tuple(f"axis{i}" for i in range(len(shape)))
    axes = tuple(axes_text.split(",")) if axes_text else default
    if len(axes) != len(shape) or len(set(axes)) != len(axes) or not all(axes):
        raise PlacementError(f"expected {len(shape)} distinct names, found {axes_text!r}", "--axes")
    return DeviceMesh(shape, axes)
