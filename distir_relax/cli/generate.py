"""The command `distir generate`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distir_relax.cli.app import app, printed_once, show_text
from distir_relax.cli.language_model import ModelArgument, ModelPrecisionOption, ModelStrategyOption, compiled_model
from distir_relax.cli.options import (
    MinPOption,
    RepetitionPenaltyOption,
    with_run_options,
)
from distir_relax.cli.prompt_lines import LineOptions, continue_prompts
from distir_relax.errors import RunError
from distir_relax.support.units import count


@app.command()
@with_run_options("weights", "backend", "device", "timeout", "require_signature")
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The prompt, as text; - reads it from standard input.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Many prompts: lines of JSON with prompt or messages, - for standard input; prints lines of JSON.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message of a chat: apply the model's chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message of the chat, before the prompt.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="ID,ID,...", help="The prompt, as token ids; the result is token ids, too.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=0, help="Number of tokens to generate; by default the model's own, or 64.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of draws; 0 takes the most probable token. By default the model's own, or 0."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the most probable tokens; 0: from all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the fewest tokens with this total probability.")
    ] = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of draws, the same on any number of ranks; by default they differ."),
    ] = None,
    stop: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID,...", help="Tokens that end the sequence; by default those of the model, for text."
        ),
    ] = None,
    stop_text: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text that ends the generated text; repeatable.")
    ] = None,
    decoder_prompt: Annotated[
        str | None,
        typer.Option(
            metavar="ID,ID,...", help="Tokens that the decoder of an encoder-decoder begins with; by default one."
        ),
    ] = None,
    strategy: ModelStrategyOption = None,
    precision: ModelPrecisionOption = None,
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Generate text or tokens with a language model, and print them as they are made.

    As one rank under mpirun or torchrun, otherwise with all ranks as threads of this process. The prompts of --prompts
    are continued together, by the engine of distir serve.
    """
    from distir_relax.bundle import BundleFile
    from distir_relax.runtime.generate_once import GenerateOptions
    from distir_relax.runtime.generate_once import generate as run
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.launched import RankOptions

    sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    ranks = RankOptions(**running)
    with compiled_model(model, strategy, precision) as bundle, joined_world(ranks.timeout) as world:
        if prompts is not None:
            others = {"--prompt": prompt, "--tokens": tokens, "--decoder-prompt": decoder_prompt}
            if given := [flag for flag, value in others.items() if value is not None]:
                raise RunError(f"expected --prompts alone, found {given[0]}")
            if ranks.backend != "torch":
                raise RunError(f"--prompts runs on the torch backend, found --backend {ranks.backend}")
            if not world.is_alone:
                raise RunError("--prompts is for one process", hint="give it without mpirun and torchrun")
            ends = None if stop is None else frozenset(_ids(stop, "--stop"))
            if system is not None and not chat:
                raise RunError("--system is for chats", hint="give --chat")
            summary = continue_prompts(
                prompts, bundle, LineOptions(max_new_tokens, sampling, ends, tuple(stop_text or ())),
                lambda text: _message(text, chat, system), reading, ranks,
            )  # fmt: skip
            typer.echo(summary, err=True)
            return
        is_first = world.rank == 0

        def show(piece: str) -> None:
            if is_first:
                show_text(piece)

        with printed_once(world):
            options = GenerateOptions(
                BundleFile(bundle, **reading),
                _prompt(prompt, chat, system, tokens), max_new_tokens, sampling,
                None if stop is None else frozenset(_ids(stop, "--stop")),
                tuple(stop_text or ()), None if decoder_prompt is None else _ids(decoder_prompt, "--decoder-prompt"),
                ranks,
            )  # fmt: skip
            done = run(options, show, world)
        if is_first:
            times = ""
            if done.tokens:
                rest = (done.seconds - done.first) / max(done.tokens - 1, 1) * 1e3
                times = f": {done.first * 1e3:.3g} ms to the first, {rest:.3g} ms for each other"
            typer.echo()
            made, on = count(done.tokens, "token"), count(done.ranks, "rank")
            typer.echo(f"{made} on {on} ({done.transport}), {ranks.backend}{times}", err=True)
        world.close()


def _prompt(
    text: str | None, chat: bool, system: str | None, tokens: str | None
) -> str | Sequence[Mapping[str, str]] | tuple[int, ...]:
    """Return the prompt. Raises RunError for options that do not fit each other."""
    if (text is None) == (tokens is None):
        found = "neither" if text is None else "both"
        raise RunError(f"expected either --prompt or --tokens, found {found}", hint="--prompt takes text, --tokens ids")
    if tokens is not None:
        for flag, is_given in (("--chat", chat), ("--system", system is not None)):
            if is_given:
                raise RunError(f"{flag} is for text, found --tokens", hint="give --prompt")
        return _ids(tokens, "--tokens")
    assert text is not None
    if text == "-":
        text = sys.stdin.read()
    if system is not None and not chat:
        raise RunError("--system is for chats", hint="give --chat")
    return _message(text, chat, system)


def _message(text: str, chat: bool, system: str | None) -> str | Sequence[Mapping[str, str]]:
    """Return a text, or the messages of a chat with it."""
    if not chat:
        return text
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _ids(text: str, option: str) -> tuple[int, ...]:
    """Parse token ids. Raises RunError for other texts."""
    words = [word for word in re.split(r"[,\s]+", text) if word]
    if not all(re.fullmatch(r"\d{1,18}", word) for word in words):
        raise RunError(f"expected token ids such as 1,306,4658, found {text!r}", option)
    return tuple(map(int, words))
