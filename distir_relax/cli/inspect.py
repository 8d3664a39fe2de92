"""The commands `distir show`, `explain`, `diff`, `rules` and `post-mortem`."""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import BundleArgument, JsonOption, SizesOption, Stage, read_sizes
from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax.bundle import Bundle
    from distir_relax.ir import Module


@app.command()
def show(
    bundle: BundleArgument,
    stage: Annotated[Stage, typer.Option(help="Stage of the program.")] = Stage.distributed,
    json: JsonOption = False,
) -> None:
    """Print a bundle's program, highlighted on a terminal, and where it comes from.

    For a pipeline's distributed stage also the schedule. Ranks lower the ranked stage to the executable one when they
    load it.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.ir import parse, print_module
    from distir_relax.report.highlight import print_program
    from distir_relax.report.json_output import program_json
    from distir_relax.report.pipeline_tasks import schedule_text
    from distir_relax.report.provenance import provenance_json, provenance_lines
    from distir_relax.runtime.verification import read_stage

    opened = read_bundle(bundle, verify_weights=False)
    executable = _executable(opened) if stage is Stage.executable else None
    if json:
        plain = {"name": opened.manifest.name, "provenance": provenance_json(opened.manifest)}
        typer.echo(json_.dumps({**plain, **program_json(executable or read_stage(opened, stage.value))}))
        return
    text = print_module(executable) if executable else opened.stage(stage.value)
    if stage is Stage.distributed and "microbatch=" in text:
        text = schedule_text(parse(text)) + text
    print_program("".join(f"# {line}\n" for line in provenance_lines(opened.manifest)) + text)


def _executable(bundle: Bundle) -> Module:
    """Return the programs of a bundle's ranks at the executable stage."""
    from distir_relax.layout import assuming
    from distir_relax.lowering.emit.torch import to_executable
    from distir_relax.runtime.verification import read_stage

    ranked = read_stage(bundle, "ranked")
    with assuming(ranked.guards):
        return to_executable(ranked)


@app.command()
def explain(
    bundle: BundleArgument,
    value: Annotated[
        str | None, typer.Argument(metavar="%VALUE", help="A value of the sharded stage; the whole bundle if omitted.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Machine to predict the time for: a name or a .toml file. Without a value only.")
    ] = None,
    limit: Annotated[float, typer.Option(min=0, help="Time limit for costing other layouts (seconds).")] = 30,
    dim: SizesOption = None,
    json: JsonOption = False,
) -> None:
    """Explain a bundle: programs of ranks, placements of weights and their causes, communication, memory.

    Of a value: its layout, its cause, the communication it needs, and that of other layouts. For a bundle compiled with
    --auto: the cost of a whole step under each other layout of the value.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.cost.profile import load_profile
    from distir_relax.report.explain import explain as explanation
    from distir_relax.report.explain import explain_json
    from distir_relax.report.overview import overview

    if value is None:
        machine = None if profile is None else load_profile(profile)
        found = overview(read_bundle(bundle, verify_weights=False), machine, read_sizes(dim))
        typer.echo(json_.dumps(found.as_json()) if json else str(found))
        return
    if profile is not None:
        raise DistIRError(
            f"expected no --profile with a value, found {value}",
            hint="distir explain BUNDLE --profile NAME predicts it",
        )
    opened = read_bundle(bundle, verify_weights=False)
    arguments = opened, value, limit, read_sizes(dim)
    typer.echo(json_.dumps(explain_json(*arguments)) if json else explanation(*arguments))


@app.command()
def diff(
    first: BundleArgument,
    second: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Another bundle of the same model.")],
    profile: Annotated[
        str | None, typer.Option(help="Machine to predict times for; by default the one used by --auto, if any.")
    ] = None,
    dim: SizesOption = None,
    json: JsonOption = False,
) -> None:
    """Print the differences between two bundles: times, memory, bytes sent and stored, and layouts of values."""
    from distir_relax.bundle import read_bundle
    from distir_relax.cost.profile import load_profile
    from distir_relax.report import diff as compare

    machine = None if profile is None else load_profile(profile)
    one, other = (read_bundle(path, verify_weights=False) for path in (first, second))
    difference = compare(one, other, machine, read_sizes(dim))
    typer.echo(difference.as_json() if json else str(difference))


@app.command()
def rules(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="Op to explain; all ops if omitted.")] = None,
    operands: Annotated[list[str] | None, typer.Argument(metavar="TYPE", help="Operands such as f32[4,5].")] = None,
    attr: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An attribute; repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Print the sharding rule of each op, or explain one op, on operands of given types."""
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
    grid = Table(box=None, pad_edge=False, header_style="")
    for title in ("op", "rule", "a partial sum passes", "torch"):
        grid.add_column(title)
    for row in table():
        grid.add_row(*(text.replace("[", "\\[") for text in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(grid)


@app.command(name="post-mortem")
def post_mortem(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file that a launch has written when it failed.")],
    html: Annotated[Path, typer.Option(help="The page to write.")],
) -> None:
    """Write a page of a launch that has failed: where its ranks were, their last steps, the stacks of their threads."""
    from distir_relax.report.post_mortem_page import write_post_mortem_page

    write_post_mortem_page(file, html)
    typer.echo(f"wrote {html}")
