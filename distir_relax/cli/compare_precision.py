"""The `distir compare-precision` command."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import InputOption, JsonOption, with_options
from distir_relax.compiler.options import ImportOptions


@app.command("compare-precision")
@with_options(ImportOptions, only=("keep", "input_shapes", "dims", "constants"))
def compare_precision(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION | FILE.onnx | DIR | FILE.gguf",
            help="A function that returns (model, example_inputs), an ONNX file, or a language model.",
        ),
    ],
    options: dict[str, Any],
    precision: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Precisions: bf16, int8, int8-channel, int4.")
    ] = "bf16,int8,int4",
    text: Annotated[
        Path | None, typer.Option(help="Text for the perplexity of a language model; by default Python's help topics.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Number of tokens of the text that are used.")] = 20_000,
    input: InputOption = None,
    json: JsonOption = False,
) -> None:
    """Compare a model's results in several precisions with those in float32, and the bytes of its weights.

    Of a language model that is the perplexity on a text, of others the error of each output, on the inputs of --input
    or the example: the largest one, and the root mean square relative to the output. The model runs in this process.
    """
    from distir_relax.compiler.compare_precision import compare_precision as compare
    from distir_relax.compiler.inputs import Model, call_target, is_onnx
    from distir_relax.errors import ImportModelError

    example: tuple[Any, ...] = (target,)
    if ":" in Path(target).name and not is_onnx(target):
        found, _ = call_target(target, {})
        if not isinstance(found, Model):
            raise ImportModelError(
                f"expected a model, found {type(found).__name__}", target, "return (model, example_inputs)"
            )
        example = found.model, found.args, found.kwargs or None
        options = {"dynamic_shapes": found.dynamic_shapes, **options}
    show = None if json else typer.echo
    result = compare(
        *example, precisions=[name.strip() for name in precision.split(",")], text=text, tokens=tokens, inputs=input,
        on_result=show, **options,
    )  # fmt: skip
    if json:
        typer.echo(dumps(result.as_json()))
