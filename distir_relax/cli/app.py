"""The application that commands are added to, and how it tells a user's errors."""

from __future__ import annotations

import sys
from typing import TextIO

import typer

from distir_relax.errors import DistIRError

app = typer.Typer(
    name="distir", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Compile a sharded model to one program per rank, look at it, and run it.",
)  # fmt: skip


def complain(error: DistIRError) -> None:
    """Print a user's error to stderr."""
    print(f"error: {error}", file=sys.stderr, flush=True)


def warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning to stderr: a `warnings.showwarning`. Where in this package it was raised is no user's concern."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
