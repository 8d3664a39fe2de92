"""The `distir compile` command."""

from __future__ import annotations

import json as json_
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import (
    AutoOption,
    BatchOption,
    Emitted,
    JsonOption,
    SequenceOption,
    TaskOption,
    Weights,
    with_options,
)
from distir_relax.compiler.options import CompileOptions, ImportOptions

if TYPE_CHECKING:
    from distir_relax.cli.compile_target import Target


@app.command("compile")
@with_options(CompileOptions, ImportOptions)
def compile_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION | FILE.onnx | DIR | FILE.gguf",
            help="A function that returns the model, an ONNX file, a folder of save_pretrained, or a GGUF file.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle to write.")],
    options: dict[str, Any],
    backend: Annotated[
        list[Emitted] | None, typer.Option(help="Backend to generate code for now, to see its errors; repeatable.")
    ] = None,
    auto: AutoOption = False,
    train: Annotated[bool, typer.Option("--train", help="Compile a training step from a dr.Training.")] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Value of the function's parameter ranks.")] = None,
    task: TaskOption = None,
    batch: BatchOption = None,
    sequence: SequenceOption = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Compile the language model of a DIR or a GGUF file to generate text.")
    ] = False,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: tokens of prompt and text; by default the model's maximum."),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="With --generate: sequences at once; by default any number.")
    ] = None,
    max_source: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: tokens of an encoder's input; by default the model's maximum."),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(help="With --generate: refer to the safetensors files of a DIR, as by default, or copy weights."),
    ] = None,
    times: Annotated[bool, typer.Option("--times", help="Print the time of each pass.")] = False,
    json: JsonOption = False,
) -> None:
    """Compile a model to a bundle.

    FUNCTION returns a Plan, (model, example_inputs), or with --train a dr.Training. It receives --ranks, --tail,
    --name and --strategy if it has parameters of these names. Open dims of an ONNX file are symbolic: --dim bounds or
    fixes them, --input-shape fixes those of an input, --constant the value of an input.
    For a folder with safetensors weights, --task, --batch and --sequence select the model class and the input shapes;
    with --generate the bundle has its tokenizer, and distir generate continues texts.
    """
    from distir_relax.cli.compile_target import Target

    pretrained = {"task": task, "batch": batch, "sequence": sequence}
    generation = {"generate": generate or None, "max_length": max_length, "max_batch": max_batch,
                  "max_source": max_source, "weights": None if weights is None else weights.value}  # fmt: skip
    backends = tuple(choice.value for choice in backend or Emitted)
    _compile(Target(target, options, auto, train, ranks, pretrained, generation), output, backends, times, json)


def _compile(target: Target, output: Path, backends: tuple[str, ...], times: bool, as_json: bool) -> None:
    """Compile with a progress display, write the bundle, and print a summary."""
    from rich.console import Console

    from distir_relax.bundle import read_bundle
    from distir_relax.cli.compile_target import compile_target
    from distir_relax.cli.progress import Progress
    from distir_relax.compiler.pass_manager import Stages
    from distir_relax.ir import Autosharding
    from distir_relax.support.units import listed

    stages, start = Stages(), time.perf_counter()
    with Progress(Console(stderr=True), f"compiling {target.name}") as progress:
        compiled = compile_target(target, output, backends, [stages, progress], progress.written)
    footprint, proof = compiled.footprint, compiled.proof
    if as_json:
        from distir_relax.report.json_output import compiled_json

        summary = compiled_json(footprint, stages.modules, stages.seconds)
        summary["checked"] = None if proof is None else list(proof.statements)
        typer.echo(json_.dumps({"output": str(output), "seconds": time.perf_counter() - start, **summary}))
        return
    if times:
        for name, seconds in stages.seconds.items():
            typer.echo(f"{name:20} {seconds * 1e3:8.1f} ms")
    typer.echo(str(footprint))
    if compiled.precision is not None:
        typer.echo(compiled.precision)
    for record in stages.modules["sharded"].records if "sharded" in stages.modules else ():
        if isinstance(record, Autosharding):
            typer.echo(str(record))
    if proof is not None:
        typer.echo(f"proved in {sum(proof.seconds.values()):.2f} s: {proof.summary}")
    typer.echo(f"wrote {output} in {time.perf_counter() - start:.2f} s")
    if target.generation["generate"]:
        files = read_bundle(output, verify_weights=False).manifest.weight_files
        if files:
            typer.echo(f"weights stay in {listed([file.path for file in files], 1)}; --weights copy copies them")
