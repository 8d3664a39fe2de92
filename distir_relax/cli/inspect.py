"""The commands that show what a bundle, or the op table, says."""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import Annotated

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import BundleArgument, JsonOption, Stage


@app.command()
def show(
    bundle: BundleArgument,
    stage: Annotated[Stage, typer.Option(help="Which stage of the program.")] = Stage.distributed,
    json: JsonOption = False,
) -> None:
    """Print a bundle's program, highlighted on a terminal; the distributed stage of a pipeline with its schedule."""
    from distir_relax.bundle import read_bundle
    from distir_relax.ir import parse
    from distir_relax.report.highlight import print_program
    from distir_relax.report.json_output import program_json
    from distir_relax.report.pipeline_tasks import schedule_text
    from distir_relax.runtime.verification import read_stage

    found = read_bundle(bundle, verify_weights=False)
    if json:
        typer.echo(json_.dumps({"name": found.manifest.name, **program_json(read_stage(found, stage.value))}))
        return
    text = found.stage(stage.value)
    if stage is Stage.distributed and "microbatch=" in text:
        text = schedule_text(parse(text)) + text
    print_program(text)


@app.command()
def explain(
    bundle: BundleArgument,
    value: Annotated[str, typer.Argument(metavar="%VALUE", help="A value of the sharded stage.")],
    limit: Annotated[float, typer.Option(min=0, help="Look for other placements no longer than this (seconds).")] = 30,
    json: JsonOption = False,
) -> None:
    """Say why a value lies as it does, what is sent for it, and what another layout would send.

    Of a bundle compiled with --auto: what all of a step would have taken with each other layout of it.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.report.explain import explain as explanation
    from distir_relax.report.explain import explain_json

    found = read_bundle(bundle, verify_weights=False)
    typer.echo(json_.dumps(explain_json(found, value, limit)) if json else explanation(found, value, limit))


@app.command()
def diff(
    first: BundleArgument,
    second: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Another one, of the same model.")],
    profile: Annotated[
        str | None, typer.Option(help="The machine that times are for; by default that of --auto, if one had it.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print what differs between two bundles: times, memory, bytes sent and held, and the values that lie otherwise."""
    from distir_relax.bundle import read_bundle
    from distir_relax.cost.profile import load_profile
    from distir_relax.report import diff as difference

    machine = None if profile is None else load_profile(profile)
    one, other = (read_bundle(path, verify_weights=False) for path in (first, second))
    found = difference(one, other, machine)
    typer.echo(found.as_json() if json else str(found))


@app.command()
def rules(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="An op to explain; all ops, if not given.")] = None,
    operands: Annotated[list[str] | None, typer.Argument(metavar="TYPE", help="Operands such as f32[4,5].")] = None,
    attr: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An attribute; may be repeated.")] = None,
    json: JsonOption = False,
) -> None:
    """Print how each op may be split, or explain one op, on operands of given types."""
    from rich.console import Console
    from rich.table import Table

    from distir_relax.report.rules import explain_rule, parse_attrs, rule_json, table

    if op is not None:
        instance = op, operands or (), parse_attrs(attr or ())
        typer.echo(json_.dumps(rule_json(*instance)) if json else explain_rule(*instance))
        return
    if json:
        typer.echo(json_.dumps([dict(zip(("op", "rule", "linear", "torch"), row, strict=True)) for row in table()]))
        return
    shown = Table(box=None, pad_edge=False, header_style="")
    for title in ("op", "rule", "a pending sum passes", "torch"):
        shown.add_column(title)
    for row in table():
        shown.add_row(*(text.replace("[", "\\[") for text in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(shown)
