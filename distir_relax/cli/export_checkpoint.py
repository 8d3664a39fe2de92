"""The `distir export-checkpoint` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distir_relax.cli.app import app


@app.command("export-checkpoint")
def export_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint of distir train, or a folder of them: the newest.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The safetensors file to write, or the folder.")],
    bundle: Annotated[
        Path | None, typer.Option(help="The bundle that was trained, which holds the parameters that are frozen.")
    ] = None,
    pretrained: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a copy of this save_pretrained folder with the weights.")
    ] = None,
    averaged: Annotated[bool, typer.Option("--averaged", help="Write the averages of the weights.")] = False,
    trained: Annotated[bool, typer.Option("--trained", help="Leave out frozen parameters.")] = False,
) -> None:
    """Write the weights of a checkpoint by the model's names, for load_state_dict or from_pretrained."""
    from distir_relax.bundle import read_bundle
    from distir_relax.checkpoints import export_pretrained, export_weights, latest
    from distir_relax.errors import CheckpointError
    from distir_relax.support.units import count

    if bundle is not None and pretrained is not None:
        raise CheckpointError("expected --bundle or --pretrained, found both", hint="DIR has the frozen parameters")
    if trained and (bundle is not None or pretrained is not None):
        raise CheckpointError("expected --trained or a source of frozen parameters, found both", "--trained")
    saved = latest(checkpoint)
    if pretrained is None:
        number = export_weights(saved, out, None if bundle is None else read_bundle(bundle), averaged, trained)
    else:
        number = export_pretrained(saved, pretrained, out, averaged)
    typer.echo(f"{out}: {count(number, 'trained tensor' if pretrained else 'tensor')} of step {saved.position.step}")
