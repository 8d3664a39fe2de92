"""The `distir` command: compile, inspect, simulate, search, run and train models."""

from __future__ import annotations

import warnings

# Importing a module registers its commands, in the order in which `distir --help` lists them.
from distir_relax.cli import (  # noqa: F401
    bisect,
    chat,
    check,
    compare_precision,
    compile,
    export_checkpoint,
    finetune,
    generate,
    inspect,
    opt,
    roofline,
    run,
    search,
    serve,
    sign,
    simulate,
    train,
)
from distir_relax.cli.app import app, print_error, warn
from distir_relax.cli.process_exit import exit_without_teardown
from distir_relax.cli.signals import Interrupted, exit_interrupted, raise_on_signals
from distir_relax.errors import DistIRError

__all__ = ["app", "main", "run_command_line"]


def main() -> None:
    """The program `distir`: `run_command_line`, and the end of the process."""
    with exit_without_teardown():
        run_command_line()


def run_command_line() -> None:
    """Run a command. User errors print one message to stderr and exit with their code; warnings print one line each.

    On SIGINT, SIGTERM or SIGHUP a command cleans up, ends the processes that it started, and exits with 128 plus the
    signal number.
    """
    warnings.showwarning = warn
    try:
        raise_on_signals()
        app()
    except DistIRError as error:
        print_error(error)
        raise SystemExit(error.exit_code) from None
    except Interrupted as interrupted:
        exit_interrupted(interrupted)
