"""The command `distir`: compile a model, look at it, predict it, run it on its ranks."""

from __future__ import annotations

import warnings

# Each file adds its commands when it is imported, in the order in which `distir --help` lists them.
from distir_relax.cli import compile, inspect, opt, run, search, simulate, train  # noqa: F401
from distir_relax.cli.app import app, complain, warn
from distir_relax.cli.signals import Interrupted, end, raise_on_signals
from distir_relax.errors import DistIRError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line. Errors of the user are one message on stderr and exit code 2, warnings a line each.

    Interrupted (SIGINT, SIGTERM or SIGHUP) a command undoes what it has begun, ends the processes that it has started,
    and gives 128 and the signal's number.
    """
    warnings.showwarning = warn
    try:
        raise_on_signals()
        app()
    except DistIRError as error:
        complain(error)
        raise SystemExit(2) from None
    except Interrupted as interrupted:
        end(interrupted)
