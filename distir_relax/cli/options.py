"""Options shared by several commands, and options derived from the declarations in `distir_relax.compiler.options`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from distir_relax.compiler.options import CompileOptions, ImportOptions, Option, declared, read_mesh
from distir_relax.errors import DistIRError


class Emitted(StrEnum):
    """Backend whose code a compilation generates."""

    torch = "torch"
    tvm = "tvm"


class Backend(StrEnum):
    """Backend that runs a rank's program; `checked` is torch with a check of each result."""

    torch = "torch"
    tvm = "tvm"
    checked = "checked"


class Stage(StrEnum):
    """A stage of the program."""

    sharded = "sharded"
    distributed = "distributed"
    ranked = "ranked"
    executable = "executable"


class Device(StrEnum):
    """Device type of a rank."""

    cpu = "cpu"
    cuda = "cuda"


class Launcher(StrEnum):
    """Command that starts the ranks of a launch."""

    mpirun = "mpirun"
    torchrun = "torchrun"


class Weights(StrEnum):
    """Place of a bundle's weights."""

    refer = "refer"
    copy = "copy"


BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that distir compile wrote.")]
InputOption = Annotated[Path | None, typer.Option("--input", "-i", help="The inputs: an .npz of global arrays.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Write the global outputs to this .npz.")]
HostOption = Annotated[
    str | None, typer.Option(metavar="HOST:RANKS,...", help="Hosts and their ranks, which agents start.")
]
RshOption = Annotated[str, typer.Option(help="Remote shell that starts ranks on other hosts; ssh by default.")]
DeviceOption = Annotated[Device, typer.Option(help="Device type of the ranks.")]
TimeoutOption = Annotated[
    float, typer.Option(min=0, help="Abort if a rank waits longer than this (seconds; 0: never).")
]
RUN_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "backend": (Annotated[Backend, typer.Option(help="Backend that runs the ranks' programs.")], Backend.torch),
    "device": (DeviceOption, Device.cpu),
    "timeout": (TimeoutOption, 120.0),
}
"""The options of how ranks run a bundle (`runtime.launched.RankOptions`), with their types and defaults."""
_WEIGHTS = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR | FILE", help="Safetensors files whose tensors take the place of the model's, of the same shapes."
    ),
]
_TRUST = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Run the Python programs in the bundle, which may be edited; otherwise nothing in it is executed.",
    ),
]
_SIGNATURE = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        metavar="KEY.pub",
        help="Run the bundle only if this public key has signed it (distir sign), and no file of it was edited.",
    ),
]
READ_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "weights": (_WEIGHTS, None), "trust_code": (_TRUST, False), "require_signature": (_SIGNATURE, None),
}  # fmt: skip
"""The options of how a bundle is read (`bundle.ReadOptions`), likewise."""
PassesOption = Annotated[
    int, typer.Option(min=1, help="Number of times to repeat all measurements; speeds vary over minutes.")
]
RepeatOption = Annotated[int, typer.Option(min=1, help="Number of timed steps, after one warm-up step.")]
ReportOption = Annotated[Path | None, typer.Option(help="Write times, bytes sent and weight bytes to this .json.")]
TraceOption = Annotated[Path | None, typer.Option(help="Draw predicted and measured pipeline tasks to this .svg.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SizesOption = Annotated[
    list[str] | None, typer.Option("--dim", metavar="NAME=SIZE", help="Value of a symbolic size; typical by default.")
]
AutoOption = Annotated[bool, typer.Option("--auto", help="Choose placements on --mesh by optimization.")]
TaskOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Task of a DIR: causal-lm, feature-extraction, ...; by default the saved class."),
]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Batch size for the model of a DIR; 1 by default.")]
MinPOption = Annotated[
    float | None, typer.Option(help="Draw from the tokens with at least this share of the largest probability.")
]
RepetitionPenaltyOption = Annotated[
    float | None, typer.Option(help="Penalty for tokens of the prompt and the text so far; 1: none.")
]
MaxRequestsOption = Annotated[int, typer.Option(min=1, help="Number of requests that run at once.")]
StateMemoryOption = Annotated[float, typer.Option(min=0, metavar="GB", help="Memory of a rank for states of requests.")]
StepTokensOption = Annotated[int, typer.Option(min=1, help="Maximum number of rows of a step.")]
ChunkTokensOption = Annotated[
    int, typer.Option(min=1, help="Maximum number of rows of prompts in a step in which others generate.")
]
SequenceOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens per sample; by default 128, or the model's maximum if smaller.")
]


def with_options(
    *groups: type, only: Sequence[str] = (), more: Mapping[str, Option] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that `groups` declare to a command, or `only` some of them, and `more`.

    The command receives them as its parameter `options`: a dict of the values that were passed. ``--axes`` comes with
    ``--mesh``.
    """
    options = {name: option for group in groups for name, option in declared(group).items() if option.cli}
    options = {name: option for name, option in options.items() if not only or name in only} | dict(more or {})

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        explicit = inspect.signature(command, eval_str=True).parameters.values()
        derived = [_parameter(name, option) for name, option in options.items()]
        if "mesh" in options:
            axes = Option(None, "Names of the mesh's axes.", str, metavar="dp,tp")
            index = next(i for i, parameter in enumerate(derived) if parameter.name == "mesh")
            derived.insert(index + 1, _parameter("axes", axes))
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [*(p.replace(kind=keyword) for p in explicit if p.name != "options"), *derived]

        def run(**values: Any) -> None:
            command(options=_collect(options, values), **values)

        return _with_parameters(run, command, parameters)

    return decorate


def with_run_options(*names: str, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of how a bundle is read and run to a command: those of these `names`, by default all.

    The command receives those of `READ_OPTIONS` as its parameter `reading`, and those of `RUN_OPTIONS` as `running`:
    dicts of keyword arguments.
    """
    groups = {
        group: {name: option for name, option in options.items() if not names or name in names}
        for group, options in (("reading", READ_OPTIONS), ("running", RUN_OPTIONS))
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        explicit = inspect.signature(command, eval_str=True).parameters.values()
        derived = [
            inspect.Parameter(name, keyword, default=timeout if name == "timeout" else default, annotation=annotation)
            for options in groups.values() for name, (annotation, default) in options.items()
        ]  # fmt: skip
        parameters = [*(p.replace(kind=keyword) for p in explicit if p.name not in groups), *derived]

        def run(**values: Any) -> None:
            for group, options in groups.items():
                given = {name: values.pop(name) for name in options}
                values[group] = {name: x.value if isinstance(x, StrEnum) else x for name, x in given.items()}
            command(**values)

        return _with_parameters(run, command, parameters)

    return decorate


def _with_parameters(
    run: Callable[..., None], command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Return a function that the command line takes for a command with these parameters."""
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def read_sizes(texts: Sequence[str] | None) -> dict[str, int]:
    """Parse values of symbolic sizes: ``sequence=512``. Raises `DistIRError` for other texts."""
    values = read_size_ranges(texts)
    for name, sizes in values.items():
        if len(sizes) > 1:
            raise DistIRError("expected one size, found several", f"--dim {name}", f"--dim {name}={sizes[0]}")
    return {name: sizes[0] for name, sizes in values.items()}


def read_size_ranges(texts: Sequence[str] | None) -> dict[str, list[int]]:
    """Parse values of symbolic sizes: ``sequence=512``, or several: ``sequence=128:4096:2x``, ``batch=8:64:8``.

    A range has both ends; its step is added, or multiplied if it ends in ``x``. Raises `DistIRError` for other texts.
    """
    return dict(map(_read_sizes, texts or ()))


def _read_sizes(text: str) -> tuple[str, list[int]]:
    match = _SIZES.fullmatch(text)
    if match is None:
        raise DistIRError(
            "expected NAME=SIZE or NAME=LOW:HIGH:STEP", f"--dim {text}", "for example: --dim sequence=128:4096:2x"
        )
    size, high, step = int(match["low"]), int(match["high"] or match["low"]), int(match["step"] or 1)
    sizes = [size]
    while (size := size * step if match["factor"] else size + step) <= high and len(sizes) <= _MAX_SIZES:
        sizes.append(size)
    if high < sizes[0] or len(sizes) > _MAX_SIZES:
        raise DistIRError(f"expected 1 to {_MAX_SIZES} sizes", f"--dim {text}")
    return match["name"], sizes


_SIZES = re.compile(
    r"(?P<name>[A-Za-z_]\w*)=(?P<low>[0-9]{1,12})(?::(?P<high>[0-9]{1,12}):(?P<step>[0-9]{1,12})(?P<factor>x?))?",
    re.ASCII,
)
_MAX_SIZES = 256


def read_workload(prompt: int | None, generate: int | None, others: Mapping[str, object]) -> tuple[int, int]:
    """Return --prompt and --generate, of which one is given. Raise `DistIRError` without the other, or with `others`.

    These are the values of options, by their flags, that a workload of generation has no use for.
    """
    if prompt is None or generate is None:
        raise DistIRError(
            f"expected --prompt and --generate, found no --{'prompt' if prompt is None else 'generate'}",
            hint="for example: --prompt 512 --generate 128 --requests 16",
        )
    if unused := [flag for flag, value in others.items() if value]:
        raise DistIRError(f"expected no {' and '.join(unused)} with --prompt and --generate")
    return prompt, generate


def flag_of(name: str) -> str:
    """Return the flag of an option or parameter: ``--input-shape`` for `input_shapes`."""
    option = (declared(CompileOptions) | declared(ImportOptions)).get(name)
    return option.flag if option is not None and option.flag else f"--{name.replace('_', '-')}"


def _parameter(name: str, option: Option) -> inspect.Parameter:
    flag = option.flag or flag_of(name)
    is_flag = option.cli is bool
    info = typer.Option(
        f"{flag}/--no{flag[1:]}" if is_flag and option.default is not False else flag,
        metavar=option.metavar,
        help=option.help,
        min=option.minimum,
    )
    value = Literal[option.choices] if option.choices else option.cli
    kind: Any = bool if is_flag and option.default is not None else value | None
    default = option.default if is_flag else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _collect(options: dict[str, Option], values: dict[str, Any]) -> dict[str, Any]:
    """Pop the values of `options` from those of a command, and parse them."""
    collected = {}
    axes = values.pop("axes", None)
    for name, option in options.items():
        value = values.pop(name)
        if name == "mesh":
            value = read_mesh(value, axes)
        is_default = value is option.default if option.cli is bool else value is None or value == []
        if not is_default:
            collected[name] = option.read(value) if option.read else value
    return collected


def arguments_of(context: typer.Context) -> list[str]:
    """Return the command line of the ranks of a command: its own, but for their number and hosts."""
    arguments = [str(context.command.name)]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name in ("n", "host", "rsh") or value is None or value is False:
            continue
        flag = [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in values:
            arguments += flag if item is True else [*flag, str(item)]
    return arguments
