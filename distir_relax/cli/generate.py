"""The command `distir generate`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from distir_relax.cli.app import app, exit_all
from distir_relax.cli.options import Backend, BackendOption, BundleArgument, Device, DeviceOption, TimeoutOption
from distir_relax.errors import DistIRError, RunError


@app.command()
def generate(
    bundle: BundleArgument,
    tokens: Annotated[str, typer.Option(metavar="ID,ID,...", help="The prompt, as token ids.")],
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Number of tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of draws; 0 takes the most probable token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the most probable tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens with this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of draws, which are the same on any number of ranks.")] = 0,
    stop: Annotated[str, typer.Option(metavar="ID,ID,...", help="Tokens that end the sequence.")] = "",
    backend: BackendOption = Backend.torch,
    device: DeviceOption = Device.cpu,
    timeout: TimeoutOption = 120.0,
) -> None:
    """Generate tokens with a bundle of dr.compile_generation, and print them as they are made.

    As one rank under mpirun or torchrun, otherwise with all ranks as threads of this process.
    """
    from distir_relax.runtime.generation import Sampling
    from distir_relax.runtime.generation.execute import GenerateOptions, generate_rank, generate_threads
    from distir_relax.runtime.join import joined_world

    with joined_world(timeout) as world:
        is_first = world is None or world.rank == 0

        def show(token: int) -> None:
            if is_first:
                typer.echo(f"{token} ", nl=False)

        try:
            options = GenerateOptions(
                bundle, _ids(tokens, "--tokens"), max_new_tokens, Sampling(temperature, top_k, top_p, seed),
                frozenset(_ids(stop, "--stop")), backend.value, device.value, timeout,
            )  # fmt: skip
            done = generate_threads(options, show) if world is None else generate_rank(world, options, show)
        except DistIRError as error:
            if world is None:
                raise
            exit_all(world, error)
        if is_first:
            rest = (done.seconds - done.first) / max(done.tokens - 1, 1) * 1e3
            typer.echo()
            typer.echo(
                f"{done.tokens} tokens on {done.ranks} ranks ({done.transport}), {backend.value}: "
                f"{done.first * 1e3:.3g} ms to the first, {rest:.3g} ms for each other", err=True,
            )  # fmt: skip
        if world is not None:
            world.close()


def _ids(text: str, option: str) -> tuple[int, ...]:
    """Parse token ids. Raises RunError for other texts."""
    words = [word for word in re.split(r"[,\s]+", text) if word]
    if not all(re.fullmatch(r"\d{1,18}", word) for word in words):
        raise RunError(f"expected token ids such as 1,306,4658, found {text!r}", option)
    return tuple(map(int, words))
