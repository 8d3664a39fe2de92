"""One generation from a bundle: `distir generate`, with or without mpirun or torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.runtime.generation.prompt import Prompt
from distir_relax.runtime.generation.results import bundle_tokenizer, stream_results
from distir_relax.runtime.generation.sampling import Sampling
from distir_relax.runtime.generation.token_loop import Continue, LanguageProgram, generated_tokens
from distir_relax.runtime.launched import ending_launch, load_rank
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.session import Session
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import World
from distir_relax.text import Message

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `distir generate`. `prompt` is a text, the messages of a chat, or tokens; `stop` as for `Prompt`.

    `count` and values of `sampling` that are None are the model's own.
    """

    bundle: Path
    prompt: str | Sequence[Message] | Sequence[int]
    count: int | None
    sampling: Mapping[str, Any]
    stop: frozenset[int] | None = None
    stop_text: tuple[str, ...] = ()
    decoder_prompt: tuple[int, ...] | None = None
    backend: str = "torch"
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT
    weights: Path | None = None
    require_signature: Path | None = None


@dataclass(frozen=True)
class Generated:
    """The result of a generation: the number of tokens, and the seconds for the first and for all of them."""

    tokens: int
    first: float
    seconds: float
    ranks: int
    transport: str


def generate_threads(options: GenerateOptions, show: Callable[[str], None]) -> Generated:
    """Generate with ranks as threads; `show` gets each piece of the text, or the tokens. Raises DistIRError."""
    bundle = read_bundle(options.bundle, weights=options.weights, require_signature=options.require_signature)
    program, prompt, count, sampling = _prepare(options, bundle)
    session = Session(bundle, options.backend, options.device, options.timeout, load_sequence_programs)
    feed = program.by_session(session, sampling, encoder=prompt.encoder)
    return _shown(count, feed, prompt, show, bundle.manifest.mesh.size, "threads")


def generate_rank(world: World, options: GenerateOptions, show: Callable[[str], None]) -> Generated:
    """Generate as one rank of a launch; `show` gets each piece, on all ranks.

    Errors are raised on all ranks alike, or end the launch, as by `run_rank`.
    """
    with ending_launch(world):
        prepared: list[_Prepared] = []

        def check(bundle: Bundle) -> dict[str, Any]:
            prepared.append(_prepare(options, bundle))
            program, prompt, *_ = prepared[0]
            return {name: x.numpy() for name, x in program.inputs(prompt.ids, 0, prompt.encoder).items()}

        session, _ = load_rank(
            world, options.bundle, options.backend, options.device, check, weights=options.weights,
            load_sequences=load_sequence_programs, require_signature=options.require_signature,
        )  # fmt: skip
        ((program, prompt, count, sampling),) = prepared
        # The first rank chooses for all: its draws count.
        feed = program.by_rank(session, world, sampling, prompt.encoder)
        return _shown(count, feed, prompt, show, world.size, world.kind)


_Prepared: TypeAlias = tuple[LanguageProgram, Prompt, int, Sampling]


def _prepare(options: GenerateOptions, bundle: Bundle) -> _Prepared:
    """Return the program of a bundle and the prompt, checked against each other, and the settings."""
    program = LanguageProgram.of(bundle.manifest)
    tokenizer = partial(bundle_tokenizer, bundle.texts, bundle.path, bundle.manifest.name)
    prompt = program.prompt(options.prompt, tokenizer, options.stop, options.stop_text, options.decoder_prompt)
    count, sampling = prompt.settings(options.count, options.sampling)
    program.check(prompt.ids, count)
    return program, prompt, count, sampling


def _shown(
    count: int, feed: Continue, prompt: Prompt, show: Callable[[str], None], ranks: int, transport: str
) -> Generated:
    start = time.perf_counter()
    seconds: list[float] = []

    def timed() -> Generator[torch.Tensor]:
        for step in generated_tokens(feed, prompt.ids, count, prompt.stop):
            seconds.append(time.perf_counter() - start)
            yield step

    # All ranks find the same stop text, in the same tokens.
    for result in stream_results(timed(), prompt):
        show(result if isinstance(result, str) else f"{result} ")
    return Generated(len(seconds), seconds[0] if seconds else 0.0, time.perf_counter() - start, ranks, transport)
