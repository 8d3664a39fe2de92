"""The command that compiles."""

from __future__ import annotations

import json as json_
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import (
    AutoOption,
    AxesOption,
    Backend,
    BatchOption,
    CheckpointOption,
    JsonOption,
    MemoryOption,
    MeshOption,
    ProfileOption,
    SequenceOption,
    ShapeOption,
    ShardOption,
    StagesOption,
    StrategyOption,
    Tail,
    TaskOption,
    read_stages,
)

if TYPE_CHECKING:
    from distir_relax.cli.compile_target import CompileOptions


@app.command("compile")
def compile_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION | FILE.onnx | DIR",
            help="A function that returns the model, an ONNX file, or a folder that save_pretrained wrote.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle to write.")],
    tail: Annotated[Tail | None, typer.Option(help="Uneven shards: own shapes per rank, or padded.")] = None,
    backend: Annotated[list[Backend] | None, typer.Option(help="Write programs for it; may be repeated.")] = None,
    shard: ShardOption = None,
    mesh: MeshOption = None,
    axes: AxesOption = None,
    strategy: StrategyOption = None,
    stages: StagesOption = None,
    auto: AutoOption = False,
    memory: MemoryOption = None,
    profile: ProfileOption = None,
    train: Annotated[bool, typer.Option("--train", help="Compile a step of dr.Training.")] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Passed to the function as its parameter ranks.")] = None,
    name: Annotated[str | None, typer.Option(help="The program's name in the bundle.")] = None,
    input_shape: ShapeOption = None,
    task: TaskOption = None,
    batch: BatchOption = None,
    sequence: SequenceOption = None,
    dump: Annotated[Path | None, typer.Option(help="Write the program's text after each pass to this folder.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the program after each pass.")] = False,
    outline: Annotated[bool, typer.Option(help="Make repeated blocks of the model functions.")] = True,
    check_import: Annotated[bool, typer.Option(help="Compare the program read in with the model.")] = True,
    checkpoint: CheckpointOption = None,
    fast_math: Annotated[bool, typer.Option("--fast-math", help="Let maxima and orders drop NaN on tvm.")] = False,
    times: Annotated[bool, typer.Option("--times", help="Print how long each pass took.")] = False,
    json: JsonOption = False,
) -> None:
    """Compile a model to a bundle.

    FUNCTION returns a Plan, (model, example_inputs), or with --train what to train. It is given --ranks, --tail,
    --name and --strategy where it has such parameters. An ONNX file needs --input-shape for inputs with open dims.
    A folder has safetensors weights; --task, --batch and --sequence say what of it is compiled, for which shapes.
    """
    from distir_relax.cli.compile_target import CompileOptions

    options = CompileOptions(
        target=target, output=output, tail=None if tail is None else tail.value,
        backends=tuple(choice.value for choice in backend or Backend), shardings=tuple(shard or ()), mesh=mesh,
        axes=axes, ranks=ranks, name=name, input_shapes=tuple(input_shape or ()), dump=dump, verify=verify or None,
        outline=None if outline else False, check_import=None if check_import else False, checkpoint=checkpoint,
        strategy=strategy, stages=read_stages(stages), profile=profile, train=train, auto=auto or None, memory=memory,
        task=task, batch=batch, sequence=sequence,
        fast_math=fast_math or None,
    )  # fmt: skip
    _compile(options, times, json)


def _compile(options: CompileOptions, times: bool, as_json: bool) -> None:
    """Compile, show what takes long, and print what was made."""
    from rich.console import Console

    from distir_relax.cli.compile_target import compile_target
    from distir_relax.cli.progress import Progress
    from distir_relax.compiler.pass_pipeline import Stages
    from distir_relax.ir import Autosharding

    taken, start = Stages(), time.perf_counter()
    with Progress(Console(stderr=True), f"compiling {options.target}") as progress:
        found = compile_target(options, [taken, progress])
    if as_json:
        from distir_relax.report.json_output import compiled_json

        made = compiled_json(found, taken.modules, taken.seconds)
        typer.echo(json_.dumps({"output": str(options.output), "seconds": time.perf_counter() - start, **made}))
        return
    if times:
        for name, seconds in taken.seconds.items():
            typer.echo(f"{name:20} {seconds * 1e3:8.1f} ms")
    typer.echo(str(found))
    for record in taken.modules["sharded"].records if "sharded" in taken.modules else ():
        if isinstance(record, Autosharding):
            typer.echo(str(record))
    typer.echo(f"wrote {options.output} in {time.perf_counter() - start:.2f} s")
