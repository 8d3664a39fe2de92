"""A request for tokens, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distir_relax.errors import RunError
from distir_relax.runtime.generation import Sampling
from distir_relax.serving.drafts import PromptLookup
from distir_relax.text import Tokenizer


class RunsRequests(Protocol):
    """What a request needs of its engine."""

    def step(self) -> bool:
        """Run a step."""
        ...

    def cancel(self, request: GenerationRequest) -> None:
        """End a request."""
        ...


@dataclass(eq=False, slots=True)
class GenerationRequest:
    """A request of an `Engine`; see `Engine.submit`. Iteration yields its tokens, and runs steps until there is one.

    `tokens` are those generated so far. `ended` is empty until the last of them, then ``stop``, ``length``,
    ``cancelled`` or ``error``. Times are those of `time.perf_counter`, in seconds.
    """

    number: int
    prompt: Sequence[int]
    count: int
    sampling: Sampling
    stop: frozenset[int]
    engine: RunsRequests
    on_token: Callable[[GenerationRequest], None] | None = None
    tokenizer: Tokenizer | None = None
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    error: BaseException | None = None
    submitted: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    """The time of each token."""
    lookup: PromptLookup | None = None
    """Its drafts, if the engine makes some."""

    def __repr__(self) -> str:
        ended = f", {self.ended}" if self.ended else ""
        return f"<request {self.number}: {len(self.prompt)} tokens, {len(self.tokens)} new{ended}>"

    def __iter__(self) -> Iterator[int]:
        position = 0
        while True:
            while position >= len(self.tokens) and not self.ended:
                self.engine.step()
            if position >= len(self.tokens):
                if self.error is not None:
                    raise self.error
                return
            yield self.tokens[position]
            position += 1

    def result(self) -> list[int]:
        """Run steps until the request has ended; return its tokens. Raises the error that ended it."""
        return list(self)

    def pieces(self) -> Iterator[str]:
        """Yield the text of the tokens, of a request whose prompt is text, as soon as its characters are complete."""
        if self.tokenizer is None:
            raise RunError("the prompt is tokens, not text", hint="iterate over the request for its tokens")
        decoder = self.tokenizer.decoder(self.prompt)
        yield from (piece for token in self if (piece := decoder.feed(token)))
        if rest := decoder.finish():
            yield rest

    def cancel(self) -> None:
        """End the request; its memory is free for others from the next step on."""
        self.engine.cancel(self)
