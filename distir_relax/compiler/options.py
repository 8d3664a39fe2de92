"""Compilation options: each is declared once, with its type, default, help text and command-line syntax.

`CompileOptions` are the keyword arguments of `compile` and `compile_training`; those of `LayoutOptions` are taken by
`simulate`, too, and those of `ImportOptions` by `compile` alone. `distir_relax.cli.options` derives the options of the
commands from them.
"""

from __future__ import annotations

import builtins
import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, cast, get_type_hints

from distir_relax.errors import ImportModelError, PlacementError
from distir_relax.support.precisions import PRECISION_NAMES

if TYPE_CHECKING:
    from distir_relax.compiler.pass_manager import Observer
    from distir_relax.cost.profile import Profile
    from distir_relax.frontends.dynamic_shapes import DimSpec
    from distir_relax.ir import Pass
    from distir_relax.layout import DeviceMesh
    from distir_relax.strategies.strategy import Strategy

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """Declaration of an option: its default, its help, and its command-line syntax.

    `cli` is the type of its command-line value; without it the command line does not have the option. A bool is a flag,
    with a ``--no-`` form unless it is off by default. `read` converts the command-line value.
    """

    default: Any
    help: str
    cli: Any = None
    flag: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    read: Callable[[Any], Any] | None = None


def read_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse shapes of inputs by name: ``x=1,3,224,224``. Raises `ImportModelError` for other texts."""
    return dict(map(_read_shape, texts))


def read_dims(texts: Sequence[str]) -> dict[str, int | str | tuple[int, int | None]]:
    """Parse bounds by name: ``batch=1:64``, ``batch=1:``, ``batch=8`` for a fixed size, ``b=batch`` for another dim.

    Raises `ImportModelError` for other texts.
    """
    return dict(map(_read_dim, texts))


def read_constants(texts: Sequence[str]) -> dict[str, Any]:
    """Parse values of inputs by name: ``sr=16000``, ``scale=0.5``, ``training=false``, ``sizes=1,2,3``.

    Raises `ImportModelError` for other texts.
    """
    return dict(map(_read_constant, texts))


def read_shardings(texts: Sequence[str]) -> dict[str, str]:
    """Parse placements by pattern: ``layer.*.weight=S[0]``. Raises `PlacementError` for other texts."""
    return dict(map(_read_sharding, texts))


def read_stages(text: str) -> tuple[str, ...]:
    """Parse the module names at which stages begin: ``model.layers.3,model.layers.9``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


class LayoutOptions(TypedDict, total=False):
    """Options for the distribution of a model."""

    shardings: Annotated[
        Mapping[str, Any] | Literal["auto", "tp_plan"] | None,
        Option(
            None, "Placements of parameters and inputs by glob pattern over their names.", list[str], "--shard",
            "PATTERN=PLACEMENT", read=read_shardings,
        ),
    ]  # fmt: skip
    mesh: Annotated[
        DeviceMesh | int | Sequence[int] | None,
        Option(None, "Shape of the device mesh; replaces the mesh of annotations in the model.", str, metavar="2x3"),
    ]
    strategy: Annotated[
        Strategy | str | None,
        Option(
            None, "Data, tensor, pipeline degrees, microbatches, options: 2/4/1/8,zero=1. Distributes whatever "
            "annotations leave open.", str, metavar="D/T/P/K",
        ),
    ]  # fmt: skip
    stages: Annotated[
        Sequence[str],
        Option(
            (), "Modules, or ONNX nodes, at which the pipeline stages after the first begin; by default stages have "
            "balanced costs.", str, metavar="PATH,PATH", read=read_stages,
        ),
    ]  # fmt: skip


class CompileOptions(LayoutOptions, total=False):
    """Options for compilation."""

    profile: Annotated[
        Profile | str | Path | None,
        Option(None, "Machine whose costs stages and placements are chosen by: a name or a .toml file.", str),
    ]
    memory: Annotated[
        float | None,
        Option(
            None, "Memory limit of a device for placements chosen by optimization, as 16e9.", float, metavar="BYTES",
            minimum=0,
        ),
    ]  # fmt: skip
    overlap: Annotated[
        float,
        Option(
            float(4 << 20), "Training: bytes of the buckets in which small gradients are summed, overlapped with the "
            "backward pass; 0 sums every gradient in program order.", float, metavar="BYTES", minimum=0,
        ),
    ]  # fmt: skip
    tail: Annotated[
        str,
        Option("ragged", "Uneven shards: own shapes per rank, or padded.", str, choices=("ragged", "pad")),
    ]
    name: Annotated[str | None, Option(None, "Name of the program in the bundle.", str)]
    gather_threshold: Annotated[
        int, Option(1 << 20, "Size in bytes from which an unrequested gather of a sharded tensor is a warning.")
    ]
    outline: Annotated[bool, Option(True, "Outline repeated blocks of the model into functions.", bool)]
    verify: Annotated[
        bool | None,
        Option(None, "Check the program after each pass; by default if the variable DISTIR_VERIFY is 1.", bool),
    ]
    check: Annotated[
        bool | None,
        Option(
            None, "Prove that the ranks' programs compute what the model does; by default for inference, where it "
            "takes a few percent of the time.", bool,
        ),
    ]  # fmt: skip
    dump: Annotated[str | Path | None, Option(None, "Write the program's text after each pass to this folder.", Path)]
    observers: Annotated[Sequence[Observer], Option((), "Observers of the program between passes.")]
    passes: Annotated[
        Callable[[Sequence[Pass]], Sequence[Pass]] | None,
        Option(None, "Function from the passes of the pipeline to those that run."),
    ]
    fast_math: Annotated[bool, Option(False, "Let maxima, sorts and comparisons drop NaN on the tvm backend.", bool)]


class ImportOptions(TypedDict, total=False):
    """Options for import."""

    input_shapes: Annotated[
        Mapping[str, Sequence[int]] | None,
        Option(
            None, "Shapes of inputs with open dims, of an ONNX model or an IRModule.", list[str], "--input-shape",
            "NAME=1,3,224,224", read=read_shapes,
        ),
    ]  # fmt: skip
    params: Annotated[
        Mapping[str, Any] | Sequence[Any] | None, Option(None, "Weights of an IRModule, by name or in order.")
    ]
    checkpoint: Annotated[
        str | Path | None,
        Option(None, "Safetensors file, or a folder of them, with the weights of a model without data.", Path),
    ]
    dynamic_shapes: Annotated[
        DimSpec | None,
        Option(
            None, 'Dims that may differ from call to call, by input: {"x": {0: "batch", 1: Dim("length", max=512)}}.'
        ),
    ]  # fmt: skip
    dims: Annotated[
        Mapping[str, int | tuple[int, int | None] | str] | None,
        Option(
            None, "Bounds of dims by name, a fixed size, or for ONNX models another dim of the same size.", list[str],
            "--dim", "NAME=LOW:HIGH", read=read_dims,
        ),
    ]  # fmt: skip
    constants: Annotated[
        Mapping[str, Any] | None,
        Option(
            None, "Values of inputs that are fixed at compile time, by name: numbers, true or false, lists of numbers.",
            list[str], "--constant", "NAME=VALUE", read=read_constants,
        ),
    ]  # fmt: skip
    precision: Annotated[
        str | None,
        Option(
            None, "Precision of weights and activations, or with int8 and int4 of weights alone; by default the "
            "model's own.", str, choices=PRECISION_NAMES,
        ),
    ]  # fmt: skip
    keep: Annotated[
        Sequence[str],
        Option((), "Weights, by glob pattern over their names, that --precision leaves as they are.", list[str],
               metavar="PATTERN"),
    ]  # fmt: skip
    check_import: Annotated[
        bool, Option(True, "Compare the imported program with the torch model on the example call.", bool)
    ]


class ModelOptions(CompileOptions, ImportOptions, total=False):
    """Options for import and compilation."""


@cache
def declared(group: type) -> dict[str, Option]:
    """Return the options that a group declares, by name."""
    # Startup time of the command line: types that it does not need are not imported.
    names = defaultdict(lambda: Any, {**vars(builtins), **globals()})
    hints = get_type_hints(group, names, names, include_extras=True)
    return {name: next(m for m in hint.__metadata__ if isinstance(m, Option)) for name, hint in hints.items()}


def import_options(options: ModelOptions) -> tuple[ImportOptions, CompileOptions]:
    """Return the options for import, and those for compilation. Raises TypeError for unknown options."""
    names = declared(ImportOptions)
    check_names(options, ModelOptions)
    of_import = {name: value for name, value in options.items() if name in names}
    of_compilation = {name: value for name, value in options.items() if name not in names}
    return cast(ImportOptions, of_import), cast(CompileOptions, of_compilation)


def check_names(options: Mapping[str, Any], group: type, others: Collection[str] = ()) -> None:
    """Raise TypeError for options that `group` does not declare, where `others` could be given, too."""
    names = [*others, *declared(group)]
    for option in options:
        if option not in names:
            near = difflib.get_close_matches(option, names, 1)
            similar = f", did you mean {near[0]!r}?" if near else ";"
            raise TypeError(f"there is no option {option!r}{similar} Expected one of {', '.join(names)}")


def complete(options: CompileOptions, name: str) -> CompileOptions:
    """Fill in the defaults of missing options, and `name` where none is set. Raises TypeError for unknown options."""
    check_names(options, CompileOptions)
    defaults = {option: declaration.default for option, declaration in declared(CompileOptions).items()}
    return cast(CompileOptions, defaults | options | {"name": options.get("name") or name})


def documents(*groups: type) -> Callable[[_Function], _Function]:
    """Append the help of the options of `groups` to a function's docstring."""

    def decorate(function: _Function) -> _Function:
        lines = [f"    {name}: {option.help}" for group in groups for name, option in declared(group).items()]
        function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    Options:\n\n" + "\n".join(lines) + "\n    "
        return function

    return decorate


def read_mesh(shape: str | None, axes: str | None) -> DeviceMesh | None:
    """Parse a mesh: ``2x3`` with axes ``dp,tp``, None where neither is given. Raises `PlacementError` if malformed."""
    from distir_relax.layout import DeviceMesh

    if shape is None and axes is None:
        return None
    sizes = (shape or "").lower().split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise PlacementError(
            f"expected sizes such as 2 or 2x3, found {shape!r}", "--mesh", "--axes names the axes of --mesh"
        )
    default = ["tp"] if len(sizes) == 1 else [f"axis{i}" for i in range(len(sizes))]
    names = axes.split(",") if axes else default
    if len(names) != len(sizes) or len(set(names)) != len(names) or not all(names):
        raise PlacementError(f"expected {len(sizes)} distinct names, found {axes!r}", "--axes")
    return DeviceMesh(tuple(map(int, sizes)), tuple(names))


def _read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, shape = text.rpartition("=")
    sizes = shape.split(",") if shape else []
    if not name or not equals or not all(size.strip().isdecimal() for size in sizes):
        raise ImportModelError(
            "expected NAME=SIZES", f"--input-shape {text}", "for example: --input-shape x=1,3,224,224"
        )
    return name, tuple(map(int, sizes))


def _read_dim(text: str) -> tuple[str, int | str | tuple[int, int | None]]:
    name, equals, bounds = text.rpartition("=")
    low, colon, high = bounds.partition(":")
    if name and not colon and bounds and not bounds.isdecimal():
        return name, bounds
    if not name or not equals or not low.isdecimal() or (high and not high.isdecimal()):
        raise ImportModelError("expected NAME=LOW:HIGH", f"--dim {text}", "for example: --dim sequence=1:2048")
    return name, (int(low), int(high) if high else None) if colon else int(low)


def _read_constant(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    items = [_number(item.strip()) for item in value.split(",")]
    if not name or not equals or any(item is None for item in items):
        raise ImportModelError(
            "expected NAME=NUMBER, true, false, or numbers separated by commas", f"--constant {text}",
            "for example: --constant sr=16000",
        )  # fmt: skip
    return name, items if "," in value else items[0]


def _number(text: str) -> bool | int | float | None:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _read_sharding(text: str) -> tuple[str, str]:
    pattern, equals, placement = text.partition("=")
    if not pattern or not equals or not placement:
        raise PlacementError(
            "expected PATTERN=PLACEMENT", f"--shard {text}", "for example: --shard 'layer.*.weight=S[0]'"
        )
    return pattern, placement
