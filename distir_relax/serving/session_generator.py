"""Generation by the sessions of a plan or a bundle: of one prompt, or of several at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Manifest
from distir_relax.runtime.generation import (
    LanguageProgram,
    Run,
    TokenGenerator,
    TokenOptions,
    stream_results,
    whole_result,
)
from distir_relax.runtime.requests import SessionRequests, StateBytes
from distir_relax.runtime.session import Session
from distir_relax.runtime.turns import Turns
from distir_relax.serving.engine import Engine, EngineOptions
from distir_relax.serving.request import GenerationRequest
from distir_relax.serving.start import THREADS, start_engine, with_state_memory

if TYPE_CHECKING:
    import torch

_MOST_REQUESTS = 16


class SessionGenerator(TokenGenerator):
    """Generation with ranks as threads of this process: `session` returns that of a backend."""

    def __init__(
        self, session: Callable[[str], Session], texts: Mapping[str, str], path: Path | None, name: str
    ) -> None:
        super().__init__(texts, path, name)
        self._session = session
        self._turns = Turns("the model is in use by a stream of the same thread that is not finished")

    def engine(self, options: EngineOptions | None = None, device: str = "cpu") -> Engine:
        """Return an engine that generates for many requests at once, with ranks as threads of this process.

        On one CPU rank it runs the programs of `generate`, otherwise programs and a copy of the weights of its own.
        Raises `RunError` for a program that does not continue sequences of tokens alone, and for limits that do not
        suffice for any request.
        """
        session = self._session("torch")
        if device == "cpu" and len(session.programs) == 1 and SessionRequests.can_run(session):
            options = with_state_memory(options, session.bundle.manifest)
            return Engine(SessionRequests(session), session.bundle, options)
        return start_engine(session.bundle, options, THREADS, device)

    def _turn(self) -> AbstractContextManager[None]:
        return self._turns.taken()

    def _language(self, backend: str | None) -> LanguageProgram:
        return LanguageProgram.of(self._session(backend or "torch").bundle.manifest)

    def _runs(self, backend: str | None) -> Run:
        return self._session(backend or "torch")

    def _generate_each(self, prompts: Sequence[Any], max_new_tokens: int | None, options: TokenOptions) -> list[Any]:
        session = self._session(options.get("backend") or "torch")
        if not SessionRequests.can_run(session):
            return super()._generate_each(prompts, max_new_tokens, options)
        rows = [self._settings(each, max_new_tokens, options) for each in prompts]
        longest = max(given.ids.shape[1] + count for given, count, _ in rows)
        limits = _limits(session.bundle.manifest, min(_MOST_REQUESTS, len(rows)), longest)
        executor = SessionRequests(session, options.get("timeout"))
        with self._turn(), Engine(executor, session.bundle, limits) as engine:
            found = [
                engine.submit(given.ids[0].tolist(), count, sampling, given.stop) for given, count, sampling in rows
            ]
            pairs = zip(found, (given for given, *_ in rows), strict=True)
            return [whole_result(stream_results(_steps(request), given), given) for request, given in pairs]


def _limits(manifest: Manifest, requests: int, longest: int) -> EngineOptions:
    """Return the limits of a number of requests, of at most the `longest` tokens, of which one has room in any case."""
    most = LanguageProgram.of(manifest).max_length
    # A prompt that is too long is refused when it is submitted.
    longest = longest if most is None else min(longest, most)
    options = with_state_memory(EngineOptions(requests), manifest)
    bytes_of = StateBytes(manifest)
    others = max(bytes_of.of_kinds(0)) * (requests - 1)
    return replace(options, memory=max(options.memory or 0, others + max(bytes_of.of_kinds(longest))))


def _steps(request: GenerationRequest) -> Generator[torch.Tensor]:
    """Yield the tokens of a request, each of shape (1,); it is cancelled where no more are wanted."""
    import torch

    try:
        for token in request:
            yield torch.tensor([token])
    finally:
        request.cancel()
