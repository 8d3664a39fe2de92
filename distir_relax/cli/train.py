"""The command that trains."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distir_relax.cli.app import app, complain
from distir_relax.cli.interrupts import Interrupted
from distir_relax.cli.options import Backend, BackendOption, BundleArgument, Device, DeviceOption, TimeoutOption
from distir_relax.errors import DistIRError, RunError

if TYPE_CHECKING:
    from distir_relax.runtime.training.run import Run
    from distir_relax.runtime.training.steps import Ended
    from distir_relax.runtime.world import World

INTERRUPTED = 128 + signal.SIGINT


@app.command()
def train(
    bundle: BundleArgument,
    data: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Returns batches, or a data set of single samples.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps in all, those of a resumed run included.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Write checkpoints to this folder.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Write one after so many steps, and after the last.")] = 100,
    keep: Annotated[int, typer.Option(min=1, help="Keep so many.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
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
    from distir_relax.runtime.inputs import check_writable
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launchers import detect
    from distir_relax.runtime.training.run import Run, train_rank, train_threads
    from distir_relax.runtime.training.steps import TrainOptions

    if resume and checkpoint is None:
        raise RunError("there is nothing to resume", "--resume", "name the folder: --checkpoint DIR")
    if log is not None:
        check_writable(log)
    if n is not None and detect() is None:
        asked = {"data": data, "steps": steps, "checkpoint": checkpoint, "every": every, "keep": keep, "resume": resume}
        asked |= {"log": log, "seed": seed, "backend": backend, "device": device, "timeout": timeout}
        _launch(n, bundle, asked, checkpoint)
    options = TrainOptions(steps, checkpoint, every, keep, resume, seed)
    with joined_world(timeout) as world, TrainingProgress(log) as progress:
        told = _Told(world)
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
    if ended.reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


class _Told:
    """Whether this rank of a launch was told to end. The ranks end together, behind the step that they are in."""

    def __init__(self, world: World | None) -> None:
        self.told = False
        if world is not None:
            signal.signal(signal.SIGINT, self._hear)
            signal.signal(signal.SIGTERM, self._hear)

    def __call__(self) -> bool:
        return self.told

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.told = True


def _leave(world: World, error: DistIRError) -> NoReturn:
    """End this rank after an error that all ranks have: the first one prints it, before any of them is gone."""
    if world.rank == 0:
        complain(error)
    world.close()
    raise SystemExit(2)


def _summarise(run: Run, ended: Ended) -> None:
    if ended.reason == "interrupted":
        _how_to_go_on(run.options.checkpoints, ended.step)
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
        code = launch(n, arguments)
    except Interrupted:
        _how_to_go_on(folder)
        raise
    raise typer.Exit(code)


def _how_to_go_on(folder: Path | None, step: int | None = None) -> None:
    from distir_relax.checkpoints import saved_steps

    behind = "" if step is None else f" behind step {step}"
    if folder is None:
        text = "there are no checkpoints; --checkpoint DIR writes them"
    elif steps := saved_steps(folder):
        text = f"go on from step {steps[-1]} with the same command and --resume"
    else:
        text = "there is no checkpoint yet; --every writes them earlier"
    sys.stderr.write(f"interrupted{behind}: {text}\n")
    sys.stderr.flush()
