"""The command `distir finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distir_relax.cli.app import app, printed_once
from distir_relax.cli.options import HostOption, RshOption, TimeoutOption, arguments_of
from distir_relax.cli.signals import Interrupted, SignalRecorder

if TYPE_CHECKING:
    from distir_relax.runtime.world import World


@app.command()
def finetune(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of save_pretrained, or a downloaded one.")],
    data: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Conversations, a list of messages in each line.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of the result.")],
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the conversations.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Rows in a step, of all ranks together.")] = 8,
    length: Annotated[int, typer.Option(min=8, help="Largest number of tokens of a row.")] = 1024,
    pack: Annotated[bool, typer.Option("--pack", help="Put several conversations into a row.")] = False,
    rank: Annotated[
        int, typer.Option("--lora", min=0, metavar="RANK", help="Train low-rank adapters; 0: all weights.")
    ] = 0,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate: 2e-5, or 2e-4 with --lora.")] = None,
    strategy: Annotated[str, typer.Option(metavar="D/T/P/K", help="How the training is distributed.")] = "1/1/1/1",
    precision: Annotated[str | None, typer.Option(help="float32, bf16, fp16 or bf16-true.")] = None,
    evaluation: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Conversations to evaluate after each epoch.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of conversations, and of adapters.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the folder.")] = False,
    timeout: TimeoutOption = 120.0,
    n: Annotated[int | None, typer.Option("-n", min=1, help="Number of ranks to start with mpirun.")] = None,
    host: HostOption = None,
    rsh: RshOption = "",
) -> None:
    """Fine-tune a language model on conversations, for distir chat.

    As one rank under mpirun or torchrun, otherwise with all ranks as threads of this process.
    """
    from distir_relax.cli.train import print_resume_hint
    from distir_relax.integrations.finetune import CHECKPOINTS, FineTuning, Task
    from distir_relax.runtime.hosts import read_hosts
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launch import launch, launch_on_hosts
    from distir_relax.runtime.launcher_detection import detect
    from distir_relax.runtime.training.callbacks import Progress

    if host is not None and detect() is None:
        raise typer.Exit(launch_on_hosts(read_hosts(host, n), arguments_of(context), rsh, graceful=True))
    if n is not None and detect() is None:
        raise typer.Exit(launch(n, arguments_of(context), graceful=True))
    options = FineTuning(epochs, batch, length, rank, lr, strategy, precision, evaluation, seed, pack)
    task = Task(model, data, output, options, resume)

    def prepare(world: World) -> None:
        with printed_once(world):
            task.prepare(world)
        if world.rank == 0:
            typer.echo(task.summary, err=True)

    with joined_world(timeout, prepare) as world:
        try:
            with SignalRecorder(world) as received_signal, printed_once(world):
                ended = task.train(world, [Progress()], received_signal, timeout)
        except Interrupted:
            print_resume_hint(output / CHECKPOINTS)
            raise
        if ended.signal:
            if world.rank == 0:
                print_resume_hint(output / CHECKPOINTS, ended.step, ended.reason)
        elif world.rank == 0:
            typer.echo(f"{ended.step} steps, the last with a loss of {ended.loss:.4g}; wrote {output}, for distir chat")
        world.close()
    if ended.signal:
        raise typer.Exit(128 + ended.signal)
