"""The `distir train` command."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from distir_relax.cli.app import app, printed_once
from distir_relax.cli.options import (
    BundleArgument,
    HostOption,
    RshOption,
    arguments_of,
    with_run_options,
)
from distir_relax.cli.signals import Interrupted, SignalRecorder
from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax.runtime.training.callbacks import Callback, Ended
    from distir_relax.runtime.training.train import Run


class Resume(StrEnum):
    """Checkpoint from which a run resumes."""

    last = "last"
    auto = "auto"
    best = "best"


class ResumeCommand(TyperCommand):
    """A command whose `--resume` may be given without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default value of a bare `--resume`."""
        followed = zip(args, [*args[1:], ""], strict=True)
        bare = [arg == "--resume" and after not in list(Resume) for arg, after in followed]
        return super().parse_args(ctx, [f"{arg}=last" if alone else arg for arg, alone in zip(args, bare, strict=True)])


@app.command(cls=ResumeCommand)
@with_run_options("backend", "device", "timeout", "require_signature")
def train(
    context: typer.Context,
    bundle: BundleArgument,
    data: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Returns batches, or a data set of single samples.")
    ],
    steps: Annotated[int, typer.Option(min=0, help="Total number of steps, those before a resume included.")] = 0,
    epochs: Annotated[int, typer.Option(min=0, help="Total number of epochs, instead of steps.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Write checkpoints to this folder.")] = None,
    every: Annotated[
        str, typer.Option(metavar="STEPS", help="Steps between checkpoints, or epoch; the last step is always saved.")
    ] = "100",
    keep: Annotated[int, typer.Option(min=1, help="Number of checkpoints to keep.")] = 3,
    resume: Annotated[
        Resume | None,
        typer.Option("--resume", help="Continue from the last checkpoint, or best; auto: from the newest valid one."),
    ] = None,
    best: Annotated[
        str, typer.Option(metavar="METRIC", help="Keep the best checkpoint too, by loss or another METRIC[:max].")
    ] = "",
    evaluation: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Returns batches or samples to evaluate.")
    ] = None,
    evaluate_every: Annotated[
        str, typer.Option(metavar="STEPS", help="Steps between evaluations, or epoch; the last is evaluated.")
    ] = "100",
    averaged: Annotated[bool, typer.Option("--averaged", help="Evaluate the averages of parameters.")] = False,
    load_best: Annotated[
        bool, typer.Option("--load-best", help="End with the weights of the --best checkpoint.")
    ] = False,
    limit_batches: Annotated[
        str | None, typer.Option(metavar="N", help="Batches of an epoch: a number, or a part of all such as 0.1.")
    ] = None,
    limit_evaluation_batches: Annotated[
        str | None, typer.Option(metavar="N", help="Batches of an evaluation, likewise.")
    ] = None,
    in_order: Annotated[bool, typer.Option("--in-order", help="Read a DataLoader in order.")] = False,
    grouped_by: Annotated[
        str, typer.Option(metavar="NAME", help="Make batches of samples with similar lengths of this value.")
    ] = "",
    verify_replicas: Annotated[
        int, typer.Option(min=0, metavar="N", help="Compare replicas of the state each N steps, and when it is saved.")
    ] = 0,
    max_time: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End after the step in which it is over.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH", help="Log to .csv, .jsonl, TensorBoard folder, mlflow:, wandb:, logging:; repeatable."
        ),
    ] = None,
    callbacks: Annotated[
        list[str] | None, typer.Option(metavar="FILE.py:FUNCTION", help="Returns callbacks of the run; repeatable.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page about the run to this .html.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Predict the step for this machine, for the report; its name or a file.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sample order; 0 by default.")] = None,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Number of ranks to start with mpirun.")] = None,
    host: HostOption = None,
    rsh: RshOption = "",
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Train a bundle of a training step: as one rank under mpirun or torchrun, otherwise with all ranks as threads.

    With -n or --host it starts the ranks. Hosts need all files under the same paths, and one folder of checkpoints.

    FUNCTION receives `start`, the number of the first step, and `seed`, if it has parameters of these names.
    """
    from distir_relax.bundle import BundleFile
    from distir_relax.cli.training_data import UserCallbacks, load_data, load_evaluation
    from distir_relax.runtime.handshake import agreed
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launched import RankOptions, ending_launch
    from distir_relax.runtime.launcher_detection import detect
    from distir_relax.runtime.training.callbacks import Progress, TimeLimit, logger
    from distir_relax.runtime.training.epoch_order import arrange
    from distir_relax.runtime.training.options import TrainOptions
    from distir_relax.runtime.training.train import Run
    from distir_relax.runtime.training.train import train as run_training

    def build(first: bool) -> tuple[TrainOptions, list[Callback]]:
        which = resume.value if resume else ""
        intervals = [int(text) if text.isdecimal() else text for text in (every, evaluate_every)]
        options = TrainOptions(
            steps, checkpoint, intervals[0], keep, which, seed, best, intervals[1], load_best, epochs, verify_replicas
        )
        timed = [] if max_time is None else [TimeLimit(max_time)]
        return options, [Progress(), *map(logger, log or []), *_report(report, bundle, profile, first), *timed]

    ranks = RankOptions(**running)

    def build_run() -> Run:
        options, observers = build(world.rank == 0)
        observers += map(UserCallbacks, callbacks or [])
        limits = [_limit(text, name) for text, name in (
            (limit_batches, "--limit-batches"), (limit_evaluation_batches, "--limit-evaluation-batches")
        )]  # fmt: skip
        of_epochs = lambda found: arrange(found, limits[0], in_order, grouped_by)  # noqa: E731
        evaluated = None if evaluation is None else load_evaluation(evaluation, lambda found: arrange(found, limits[1]))
        file = BundleFile(bundle, **reading)
        return Run(
            file, load_data(data, of_epochs), options, observers, evaluated, ranks, received_signal, averaged
        )  # fmt: skip

    if (n is not None or host is not None) and detect() is None:
        build(first=True)  # reports errors once, without mpirun's own output around them
        _launch(n, host, rsh, bundle, arguments_of(context), checkpoint, reading)
    with joined_world(ranks.timeout) as world, SignalRecorder(world) as received_signal:
        try:
            with printed_once(world):
                with ending_launch(world), agreed(world):
                    run = build_run()
                ended = run_training(run, world)
        except Interrupted:
            print_resume_hint(checkpoint)
            raise
        if world.rank == 0:
            _print_summary(run, ended)
        world.close()
    if ended.signal:
        raise typer.Exit(128 + ended.signal)


def _report(path: Path | None, bundle: Path, profile: str | None, first: bool) -> list[Callback]:
    """Return the callback of a report, on the first process, which alone imports the compiler to predict the step."""
    if profile is not None and path is None:
        raise DistIRError("expected a report that shows the prediction, found none", "--profile", "give --report")
    if path is None or not first:
        return []
    from distir_relax.report.training_run import RunReport

    return [RunReport(path, bundle, profile)]


def _limit(text: str | None, name: str) -> float | None:
    """Return a number of batches, or a part of all. Raises `DistIRError` for another text."""
    try:
        return None if text is None else int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise DistIRError(f"expected a number of batches, or a part of all such as 0.1, found {text!r}", name) from None


def _print_summary(run: Run, ended: Ended) -> None:
    if ended.signal:
        print_resume_hint(run.options.checkpoints, ended.step, ended.reason)
        return
    if ended.step >= ended.steps and math.isnan(ended.loss):
        typer.echo(f"no step is left: {ended.step} of {ended.steps} steps are done; give more --steps or --epochs")
        return
    why = f" ({ended.reason})" if ended.reason else ""
    wrote = f"; the last checkpoint is of step {ended.saved}" if ended.saved is not None else ""
    wrote += f", the best of step {ended.best}" if ended.best is not None else ""
    typer.echo(f"trained to step {ended.step} of {ended.steps}{why}, loss {ended.loss:.6g}{wrote}")


def _launch(
    n: int | None, host: str | None, rsh: str, bundle: Path, arguments: Sequence[str], folder: Path | None,
    reading: dict[str, Any],
) -> NoReturn:  # fmt: skip
    """Start the ranks, and exit with the launch's code; when interrupted, end them and print how to resume."""
    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.hosts import read_hosts
    from distir_relax.runtime.launch import launch, launch_on_hosts
    from distir_relax.runtime.world import check_size

    # Report errors that are known before the launch once, without mpirun's own output around them.
    mesh = read_bundle(bundle, verify_weights=False, **reading).manifest.mesh
    check_size(mesh, n or mesh.size)
    hosts = () if host is None else read_hosts(host, mesh.size)
    try:
        if hosts:
            raise typer.Exit(launch_on_hosts(hosts, arguments, rsh, graceful=True))
        raise typer.Exit(launch(mesh.size, arguments, graceful=True))
    except Interrupted:
        print_resume_hint(folder)
        raise


def print_resume_hint(folder: Path | None, step: int | None = None, reason: str = "interrupted") -> None:
    """Print how to resume a run that has ended after a step, if it has checkpoints."""
    from distir_relax.checkpoints import saved_steps

    after = "" if step is None else f" after step {step}"
    if folder is None:
        text = "there are no checkpoints; --checkpoint DIR writes them"
    elif steps := saved_steps(folder):
        text = f"resume from step {steps[-1]} with the same command and --resume"
    else:
        text = "there is no checkpoint yet; a smaller --every writes them earlier"
    sys.stderr.write(f"{reason}{after}: {text}\n")
    sys.stderr.flush()
