"""The command `distir bisect`."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from distir_relax.cli.app import app, printed_once
from distir_relax.cli.options import (
    Backend,
    BundleArgument,
    JsonOption,
    with_run_options,
)


@app.command()
@with_run_options(timeout=600.0)
def bisect(
    bundle: BundleArgument,
    input: Annotated[Path, typer.Option("--input", "-i", help="The inputs: an .npz of global arrays.")],
    against: Annotated[
        Path | None, typer.Option(metavar="BUNDLE", help="Compare with another bundle of the model, on the CPU.")
    ] = None,
    against_backend: Annotated[
        Backend | None, typer.Option(help="Compare with the same bundle on another backend.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of ops to print if two precisions are compared.")] = 10,
    tolerance: Annotated[
        float, typer.Option(help="Error that a value may have, as a multiple of the model's rounding error.")
    ] = 16.0,
    float64: Annotated[bool, typer.Option("--float64", help="Compare with the model in float64.")] = False,
    memory: Annotated[
        float, typer.Option(metavar="GB", help="Memory for recorded values; more are recorded in several runs.")
    ] = 4.0,
    json: JsonOption = False,
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Find the first value that differs from the model's beyond rounding: op, ranks, line of the model, cause.

    The ranks are threads of this process, or, under mpirun or torchrun, processes. Exits with 1 if a value is wrong.
    Compared with a bundle in another precision, no value is wrong: the ops are ranked by the error that they add.
    """
    from distir_relax.bisection.run import BisectOptions, bisect_file
    from distir_relax.bundle import BundleFile, read_bundle
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launched import RankOptions

    other = None if against_backend is None else against_backend.value
    limit = int(memory * 1e9)
    ranks = RankOptions(**running)
    with joined_world(ranks.timeout) as world:
        with printed_once(world):
            compared = None if against is None else read_bundle(against, require_signature=reading["require_signature"])
            options = BisectOptions(compared, other, tolerance, float64, top, limit, ranks.timeout)
            result = bisect_file(BundleFile(bundle, **reading), input, options, ranks, world)
        if result is not None:
            typer.echo(json_.dumps(result.as_json()) if json else repr(result))
        is_right = all(world.exchange(result is None or result.is_right, "the result"))
        world.close()
    if not is_right:
        raise typer.Exit(1)
