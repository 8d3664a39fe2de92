"""The command `distir chat`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from distir_relax.cli.app import app, print_error, show_text
from distir_relax.cli.language_model import ModelArgument, ModelPrecisionOption, ModelStrategyOption, compiled_model
from distir_relax.cli.options import (
    MinPOption,
    RepetitionPenaltyOption,
    with_run_options,
)
from distir_relax.errors import RunError
from distir_relax.support.units import count

_NEW, _QUIT = "/new", "/quit"


@app.command()
@with_run_options("weights", "device", "require_signature")
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens of a reply.")] = 1024,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of draws, 0 for none; by default the model's own.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the most probable tokens; 0: from all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest tokens with this probability.")] = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of draws; by default they differ each time.")] = None,
    strategy: ModelStrategyOption = None,
    precision: ModelPrecisionOption = None,
    *,
    reading: dict[str, Any],
    running: dict[str, Any],
) -> None:
    """Chat with a language model in the terminal, a line a message. /new begins a new chat, /quit or Ctrl-D ends.

    Ranks are threads of this process. Earlier turns are not computed again.
    """
    from distir_relax.bundle import read_bundle
    from distir_relax.serving import THREADS, EngineOptions, start_engine

    first = [] if system is None else [{"role": "system", "content": system}]
    with compiled_model(model, strategy, precision) as path:
        bundle = read_bundle(path, **reading)
        with start_engine(bundle, EngineOptions(max_requests=1), THREADS, running["device"]) as engine:
            if engine.tokenizer.template is None:
                raise RunError("the model has no chat template", str(model), "distir generate continues texts")
            given = {
                "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "min_p": min_p,
                "repetition_penalty": repetition_penalty,
            }  # fmt: skip
            messages = [*first]
            while (text := _line()) != _QUIT:
                if text == _NEW:
                    messages = [*first]
                    continue
                asked = [*messages, {"role": "user", "content": text}]
                try:
                    request = engine.submit(asked, max_new_tokens, given, fit=True)
                except RunError as error:
                    # The chat goes on without this message.
                    print_error(error)
                    continue
                pieces = []
                for piece in request.pieces():
                    pieces.append(piece)
                    show_text(piece)
                show_text("\n" if request.ended == "stop" else f"\n[cut after {count(len(request.tokens), 'token')}]\n")
                messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _line() -> str:
    """Return the next message that is not empty, without a prompt where nobody types; `_QUIT` at the end."""
    while True:
        if sys.stdin.isatty():
            show_text("> ")
        line = sys.stdin.readline()
        if not line:
            return _QUIT
        if text := line.strip():
            return text
