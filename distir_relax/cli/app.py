"""The Typer application, and printing of errors and warnings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax.runtime.world import World

app = typer.Typer(
    name="distir", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


def _version(value: bool) -> None:
    if value:
        from distir_relax import __version__

        typer.echo(f"distir {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile a sharded model to one program per rank, inspect it, and run it."""


def show_text(text: str) -> None:
    """Print generated text at once, without an end of line; a terminal may lack some of its characters."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "replace").decode(encoding), nl=False)


def print_error(error: DistIRError) -> None:
    """Print a user's error to stderr."""
    print(f"error: {error}", file=sys.stderr, flush=True)


def exit_all(world: World, error: DistIRError) -> NoReturn:
    """End this rank after an error that all ranks have; the first rank prints it before any of them exits."""
    if world.rank == 0:
        print_error(error)
    world.close()
    raise SystemExit(error.exit_code)


@contextmanager
def printed_once(world: World) -> Iterator[None]:
    """Let the first rank alone print an error that all ranks of a launch raise in the block (`exit_all`)."""
    try:
        yield
    except DistIRError as error:
        if world.is_alone:
            raise
        exit_all(world, error)


def warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning to stderr (a `warnings.showwarning`), without its position in this package."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
