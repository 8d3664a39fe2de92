"""The command `distir finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distir_relax.cli.app import app


@app.command()
def finetune(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of save_pretrained, or a downloaded one.")],
    data: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Conversations, a list of messages in each line.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of the result.")],
    epochs: Annotated[int, typer.Option(min=1, help="Number of passes over the conversations.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Conversations in a step, of all ranks together.")] = 8,
    length: Annotated[int, typer.Option(min=8, help="Largest number of tokens of a conversation.")] = 1024,
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
) -> None:
    """Fine-tune a language model on conversations, for distir chat. Ranks are threads of this process."""
    from distir_relax.integrations.finetune import FineTuning, finetune
    from distir_relax.runtime.training.callbacks import Progress

    options = FineTuning(epochs, batch, length, rank, lr, strategy, precision, evaluation, seed)
    show = lambda text: typer.echo(text, err=True)  # noqa: E731
    ended = finetune(model, data, output, options, resume=resume, callbacks=[Progress()], show=show)
    typer.echo(f"{ended.step} steps, the last with a loss of {ended.loss:.4g}; wrote {output}, for distir chat")
