"""The command `distir roofline`."""

from __future__ import annotations

import json as json_
from typing import Annotated, Any

import typer

from distir_relax.cli.app import app, printed_once
from distir_relax.cli.options import (
    BundleArgument,
    JsonOption,
    with_run_options,
)
from distir_relax.errors import DistIRError


@app.command()
@with_run_options("device", "require_signature")
def roofline(
    bundle: BundleArgument,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after some to warm up.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="For text generation: tokens of a prompt.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="For text generation: requests of a step.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="The rank whose ops are printed.")] = 0,
    most: Annotated[int, typer.Option(min=1, help="Rows of a table; all ops are in --json.")] = 16,
    json: JsonOption = False,
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Measure each op of a rank's program beside the limit of this machine: its products, and its memory.

    A bundle of several ranks is started with mpirun.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.calibration.measure_ops import measure_op_times
    from distir_relax.report.op_times import op_times_json, op_times_text
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launch import launch
    from distir_relax.runtime.machine import limit_threads, retain_freed_memory
    from distir_relax.runtime.world import check_size

    with joined_world() as world:
        with printed_once(world):
            read = read_bundle(bundle, reading["require_signature"] is not None, **reading)
            size = read.manifest.mesh.size
            if rank >= size:
                raise DistIRError(f"expected a rank less than {size}, found {rank}", str(bundle))
            if not world.is_alone:
                check_size(read.manifest.mesh, world.size)
        if world.is_alone and size > 1:
            given = {"steps": steps, "tokens": tokens, "requests": requests, "rank": rank, "most": most, **running}
            options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
            options += ["--json"] if json else []
            key = reading["require_signature"]
            options += [] if key is None else ["--require-signature", str(key)]
            raise typer.Exit(launch(size, ["roofline", str(bundle), *options]))
        limit_threads(world.local_size)
        retain_freed_memory()
        times = measure_op_times(read, world, running["device"], steps, tokens, requests)
        if world.rank == rank:
            typer.echo(json_.dumps(op_times_json(times)) if json else op_times_text(times, most))
        world.close()
