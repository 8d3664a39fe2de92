"""The `distir opt` command: run passes on program text."""

from __future__ import annotations

import inspect as inspect_
import json as json_
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import JsonOption
from distir_relax.errors import DistIRError


@app.command()
def opt(
    program: Annotated[
        str | None, typer.Argument(metavar="FILE.txt", help="Text of a program at any stage; - is standard input.")
    ] = None,
    passes: Annotated[
        str, typer.Option(metavar="PASS,PASS{OPTION=VALUE}", help="The passes to run, in order; see --list.")
    ] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the program before and after each pass.")] = False,
    print_after_all: Annotated[
        bool, typer.Option("--print-after-all", help="Print the program after each pass.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the passes and their options.")] = False,
    import_: Annotated[
        list[Path] | None, typer.Option("--import", metavar="FILE.py", help="Import a file first, to register passes.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run passes on the text of a program, and print the result.

    For example: distir opt program.txt --passes 'propagate{mesh=2},delay-reductions,to-distir{tail=pad},project'
    """
    from distir_relax.support.user_function import import_file

    for file in import_ or ():
        import_file(file)
    if list_:
        _list(json)
        return
    if program is None:
        raise DistIRError("expected a program file", hint="distir opt FILE.txt --passes ...; - reads from a pipe")
    text = _run(program, passes, verify, print_after_all)
    if output is None:
        typer.echo(text, nl=False)
        return
    from distir_relax.support.files import write_text

    write_text(output, text)


def _run(program: str, passes: str, verify: bool, print_after_all: bool) -> str:
    from distir_relax.compiler.pass_manager import Observer, Verify, run_passes
    from distir_relax.compiler.pass_text import parse_passes, print_pass
    from distir_relax.interpret.type_propagation import infer_types
    from distir_relax.ir import Module, Pass, parse, print_module
    from distir_relax.support import read_text

    class Printer(Observer):
        """Print the program after each pass."""

        def end(self, number: int, step: Pass | None, module: Module, seconds: float) -> None:
            """Print the program."""
            if step is not None:
                typer.echo(f"# after {print_pass(step)}\n{print_module(module)}")

    steps = parse_passes(passes)
    source = sys.stdin.read() if program == "-" else read_text(Path(program), DistIRError)
    module = parse(source, program)
    if module.stage in ("global", "distributed"):
        module = infer_types(module)
    observers = [*([Verify()] if verify else []), *([Printer()] if print_after_all else [])]
    return print_module(run_passes(module, steps, observers))


def _list(as_json: bool) -> None:
    from distir_relax.compiler.pass_text import PASSES, pass_options

    if as_json:
        entries = [
            {
                "name": name,
                "takes": list(kind.takes),
                "gives": kind.gives,
                "description": inspect_.getdoc(kind),
                "options": [asdict(option) for option in pass_options(kind)],
            }
            for name, kind in PASSES.items()
        ]
        typer.echo(json_.dumps(entries))
        return
    for name, kind in PASSES.items():
        typer.echo(f"{name}: {' or '.join(kind.takes)} -> {kind.gives or 'the same stage'}")
        typer.echo(indent(inspect_.getdoc(kind) or "", "    "))
        for option in pass_options(kind):
            default = "required" if option.default is None else f"default {option.default}"
            typer.echo(f"    {option.name}: {option.type} ({default})")
        typer.echo("")
