"""One generation from a bundle: `distir generate`, with or without mpirun or torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.bundle import Bundle, BundleFile
from distir_relax.runtime.generation.prompt import Prompt
from distir_relax.runtime.generation.results import bundle_tokenizer, stream_results
from distir_relax.runtime.generation.sampling import Sampling
from distir_relax.runtime.generation.token_loop import Continue, LanguageProgram, generated_tokens
from distir_relax.runtime.launched import RankOptions, ending_launch, open_session
from distir_relax.runtime.requests.sequence_program import load_sequence_programs
from distir_relax.runtime.world import ALONE, World
from distir_relax.text import Message

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `distir generate`. `prompt` is a text, the messages of a chat, or tokens; `stop` as for `Prompt`.

    `count` and values of `sampling` that are None are the model's own.
    """

    bundle: BundleFile
    prompt: str | Sequence[Message] | Sequence[int]
    count: int | None
    sampling: Mapping[str, Any]
    stop: frozenset[int] | None = None
    stop_text: tuple[str, ...] = ()
    decoder_prompt: tuple[int, ...] | None = None
    ranks: RankOptions = field(default_factory=RankOptions)


@dataclass(frozen=True)
class Generated:
    """The result of a generation: the number of tokens, and the seconds for the first and for all of them."""

    tokens: int
    first: float
    seconds: float
    ranks: int
    transport: str


def generate(options: GenerateOptions, show: Callable[[str], None], world: World = ALONE) -> Generated:
    """Generate as one rank of a launch, or alone; `show` gets each piece of the text, or the tokens, on all ranks.

    Errors are raised on all ranks alike, or end the launch, as by `execute.run`.
    """
    with ending_launch(world):
        prepared: list[_Prepared] = []

        def check(bundle: Bundle) -> dict[str, Any]:
            prepared.append(_prepare(options, bundle))
            program, prompt, *_ = prepared[0]
            return {name: x.numpy() for name, x in program.inputs(prompt.ids, 0, prompt.encoder).items()}

        session, _ = open_session(world, options.bundle, options.ranks, check, load_sequence_programs)
        ((program, prompt, count, sampling),) = prepared
        feed = program.feed(session, sampling, encoder=prompt.encoder, world=world)
        return _shown(count, feed, prompt, show, session.bundle.manifest.mesh.size, world.kind)


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
