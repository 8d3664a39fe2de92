"""One generation from a bundle: `distir generate`, with or without mpirun or torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, read_bundle
from distir_relax.runtime.generation.prompt import prompt_ids
from distir_relax.runtime.generation.sampling import Sampling
from distir_relax.runtime.generation.token_loop import LanguageProgram, generated_tokens
from distir_relax.runtime.launched import ending_launch, load_rank
from distir_relax.runtime.session import Session
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.runtime.world import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `distir generate`."""

    bundle: Path
    tokens: tuple[int, ...]
    count: int
    sampling: Sampling
    stop: frozenset[int] = frozenset()
    backend: str = "torch"
    device: str = "cpu"
    timeout: float = DEFAULT_TIMEOUT


@dataclass(frozen=True)
class Generated:
    """The result of a generation: the number of tokens, and the seconds for the first and for all of them."""

    tokens: int
    first: float
    seconds: float
    ranks: int
    transport: str


def generate_threads(options: GenerateOptions, show: Callable[[int], None]) -> Generated:
    """Generate with ranks as threads; `show` gets each token. Raises DistIRError."""
    bundle = read_bundle(options.bundle)
    program = LanguageProgram.of(bundle.manifest)
    prompt, _ = prompt_ids(options.tokens)
    program.check(prompt, options.count)
    feed = program.by_session(Session(bundle, options.backend, options.device, options.timeout), options.sampling)
    steps = generated_tokens(feed, prompt, options.count, options.stop)
    return _shown(steps, show, bundle.manifest.mesh.size, "threads")


def generate_rank(world: World, options: GenerateOptions, show: Callable[[int], None]) -> Generated:
    """Generate as one rank of a launch; `show` gets each token, on all ranks.

    Errors are raised on all ranks alike, or end the launch, as by `run_rank`.
    """
    with ending_launch(world):
        prompt, _ = prompt_ids(options.tokens)

        def check(bundle: Bundle) -> dict[str, Any]:
            program = LanguageProgram.of(bundle.manifest)
            program.check(prompt, options.count)
            return {program.tokens: prompt.numpy()}

        session, _ = load_rank(world, options.bundle, options.backend, options.device, check)
        program = LanguageProgram.of(session.bundle.manifest)
        steps = generated_tokens(program.by_rank(session, world, options.sampling), prompt, options.count, options.stop)
        return _shown(steps, show, world.size, world.kind)


def _shown(steps: Iterator[torch.Tensor], show: Callable[[int], None], ranks: int, transport: str) -> Generated:
    start = time.perf_counter()
    count, first = 0, 0.0
    for step in steps:
        count += 1
        first = first or time.perf_counter() - start
        show(int(step[0]))
    return Generated(count, first, time.perf_counter() - start, ranks, transport)
