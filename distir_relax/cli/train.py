"""The command that trains."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from distir_relax.cli.app import app, complain
from distir_relax.cli.options import Backend, BackendOption, BundleArgument, Device, DeviceOption, TimeoutOption
from distir_relax.cli.signals import Interrupted
from distir_relax.errors import DistIRError, RunError

if TYPE_CHECKING:
    from distir_relax.runtime.training.train import Run
    from distir_relax.runtime.training.training_loop import Ended
    from distir_relax.runtime.world import World


class Resume(StrEnum):
    """Where a run goes on."""

    last = "last"
    auto = "auto"


class ResumeCommand(TyperCommand):
    """A command whose `--resume` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare `--resume` its value."""
        followed = zip(args, [*args[1:], ""], strict=True)
        bare = [arg == "--resume" and after not in list(Resume) for arg, after in followed]
        return super().parse_args(ctx, [f"{arg}=last" if alone else arg for arg, alone in zip(args, bare, strict=True)])


@app.command(cls=ResumeCommand)
def train(
    bundle: BundleArgument,
    data: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Returns batches, or a data set of single samples.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps in all, those of a resumed run included.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Write checkpoints to this folder.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Write one after so many steps, and after the last.")] = 100,
    keep: Annotated[int, typer.Option(min=1, help="Keep so many.")] = 3,
    resume: Annotated[
        Resume | None,
        typer.Option("--resume", help="Continue from the last checkpoint; auto: from the newest valid one, if any."),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write loss and seconds of each step to this .csv.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the order of samples (0 unless given).")] = None,
    backend: BackendOption = Backend.torch,
    device: DeviceOption = Device.cpu,
    timeout: TimeoutOption = 120.0,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Start so many ranks with this machine's mpirun.")] = None,
) -> None:
    """Train a bundle of a step of training: as one rank under mpirun or torchrun, otherwise with ranks as threads.

    FUNCTION is given `start`, the number of the first step, and `seed`, where it has parameters of these names.
    """
    from distir_relax.cli.training_data import data_of
    from distir_relax.cli.training_progress import TrainingProgress
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launcher_detection import detect
    from distir_relax.runtime.training.train import Run, train_rank, train_threads
    from distir_relax.runtime.training.training_loop import TrainOptions

    _check(resume, checkpoint, log)
    if n is not None and detect() is None:
        asked = {"data": data, "steps": steps, "checkpoint": checkpoint, "every": every, "keep": keep, "resume": resume}
        asked |= {"log": log, "seed": seed, "backend": backend, "device": device, "timeout": timeout}
        _launch(n, bundle, asked, checkpoint)
    options = TrainOptions(steps, checkpoint, every, keep, resume.value if resume else "", seed)
    with joined_world(timeout) as world, TrainingProgress(log) as progress, _Told(world) as told:
        run = Run(bundle, data_of(data), options, progress, backend.value, device.value, timeout, told)
        try:
            ended = train_threads(run) if world is None else train_rank(world, run)
        except Interrupted:
            progress.stop()
            _how_to_go_on(checkpoint)
            raise
        except DistIRError as error:
            if world is None:
                raise
            progress.stop()
            _leave(world, error)
        progress.stop()
        if world is None or world.rank == 0:
            _summarise(run, ended)
        if world is not None:
            world.close()
    if ended.signal:
        raise typer.Exit(128 + ended.signal)


class _Told:
    """The signal that this process was sent, or 0: `told()`. Ranks end together, behind the step that they are in.

    Where ranks are threads, SIGINT and a second signal end the process at once.
    """

    def __init__(self, world: World | None) -> None:
        self._alone = world is None
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Told:
        from distir_relax.runtime.training.training_loop import CHECKPOINT_SIGNALS

        for number in (*CHECKPOINT_SIGNALS, *(() if self._alone else (signal.SIGINT,))):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> int:
        return self._number

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._number and self._alone:
            raise Interrupted(number)
        self._number = self._number or number


def _check(resume: Resume | None, checkpoint: Path | None, log: Path | None) -> None:
    from distir_relax.runtime.inputs import check_writable

    if resume is not None and checkpoint is None:
        raise RunError("there is nothing to resume", "--resume", "name the folder: --checkpoint DIR")
    if log is not None:
        check_writable(log)


def _leave(world: World, error: DistIRError) -> NoReturn:
    """End this rank after an error that all ranks have: the first one prints it, before any of them is gone."""
    if world.rank == 0:
        complain(error)
    world.close()
    raise SystemExit(2)


def _summarise(run: Run, ended: Ended) -> None:
    if ended.signal:
        _how_to_go_on(run.options.checkpoints, ended.step, ended.reason)
        return
    why = f" ({ended.reason})" if ended.reason else ""
    wrote = f"; the last checkpoint is of step {ended.saved}" if ended.saved is not None else ""
    typer.echo(f"trained to step {ended.step} of {run.options.steps}{why}, loss {ended.loss:.6g}{wrote}")


def _launch(n: int, bundle: Path, asked: Mapping[str, object], folder: Path | None) -> NoReturn:
    """Have mpirun start the ranks, and end with its code; interrupted, end them and say how to go on."""
    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.launch import launch
    from distir_relax.runtime.world import check_size

    # What is wrong already is said once and here, without mpirun's own words around it.
    check_size(read_bundle(bundle, verify_weights=False).manifest.mesh, n)
    arguments = ["train", str(bundle)]
    for option, value in asked.items():
        if value is not None and value is not False:
            arguments += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    try:
        code = launch(n, arguments, graceful=True)
    except Interrupted:
        _how_to_go_on(folder)
        raise
    raise typer.Exit(code)


def _how_to_go_on(folder: Path | None, step: int | None = None, reason: str = "interrupted") -> None:
    from distir_relax.checkpoints import saved_steps

    after = "" if step is None else f" after step {step}"
    if folder is None:
        text = "there are no checkpoints; --checkpoint DIR writes them"
    elif steps := saved_steps(folder):
        text = f"go on from step {steps[-1]} with the same command and --resume"
    else:
        text = "there is no checkpoint yet; --every writes them earlier"
    sys.stderr.write(f"{reason}{after}: {text}\n")
    sys.stderr.flush()
