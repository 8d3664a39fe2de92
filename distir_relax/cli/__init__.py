"""The command `distir`: compile a model, look at it, predict it, run it on its ranks."""

from __future__ import annotations

import warnings

# Each file adds its commands when it is imported, in the order in which `distir --help` lists them.
from distir_relax.cli import compile, inspect, predict, run  # noqa: F401
from distir_relax.cli.app import app, complain, warn
from distir_relax.errors import DistIRError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line. Errors of the user are one message on stderr and exit code 2, warnings a line each."""
    warnings.showwarning = warn
    try:
        app()
    except DistIRError as error:
        complain(error)
        raise SystemExit(2) from None
