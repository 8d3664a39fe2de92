"""The loop that feeds tokens back to a program that continues a sequence, in one process or on ranks of a launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from distir_relax.bundle import Encoder, Manifest
from distir_relax.errors import RunError
from distir_relax.runtime.generation.prompt import Prompt, features_prompt, stop_tokens, token_ids
from distir_relax.runtime.generation.sampling import Sampling, SequenceSampler
from distir_relax.runtime.world import ALONE, World
from distir_relax.text import Tokenizer

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array

Continue: TypeAlias = "Callable[[torch.Tensor, int], torch.Tensor]"
"""Feeds tokens, (batch, new), after so many earlier ones, and returns the next token of each row, (batch,)."""


class Run(Protocol):
    """A call of a session: see `Session.__call__`."""

    def __call__(
        self, inputs: Mapping[str, Array], timeout: float | None, outputs: Collection[str] | None, past: int
    ) -> dict[str, torch.Tensor]: ...


def generated_tokens(
    feed: Continue, prompt: torch.Tensor, count: int, stop: Collection[int]
) -> Generator[torch.Tensor]:
    """Yield up to `count` tokens after `prompt`, int64 of shape (batch, length), each of shape (batch,).

    A row that has reached a token of `stop` repeats it; the last token is one that ends all rows.
    """
    import torch

    ends = torch.tensor(sorted(stop), dtype=torch.int64)
    ended = torch.zeros(len(prompt), dtype=torch.bool)
    fed, past, last = prompt, 0, prompt[:, -1]
    for _ in range(count):
        last = torch.where(ended, last, feed(fed, past))
        past += fed.shape[1]
        yield last
        ended |= torch.isin(last, ends)
        if bool(ended.all()):
            return
        fed = last[:, None]


@dataclass(frozen=True)
class LanguageProgram:
    """A program that continues sequences of tokens: the names of its input and output.

    `max_length` is the largest number of tokens of a sequence, None if there is no bound, and `vocabulary` the number
    of different tokens. That of an encoder-decoder has an `encoder`.
    """

    name: str
    tokens: str
    logits: str
    max_length: int | None
    vocabulary: int
    encoder: Encoder | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> LanguageProgram:
        """Return that of a bundle. Raises RunError if its program is another one."""
        if not manifest.states or len(manifest.inputs) != 1 or len(manifest.outputs) != 1:
            raise RunError(
                "the program does not continue sequences of tokens",
                manifest.name,
                "compile the model with dr.compile_generation, and save its plan",
            )
        longest = next(symbol.high for symbol in manifest.symbols if symbol.name == "new")
        (tokens,), (logits,) = manifest.inputs, manifest.outputs
        return cls(manifest.name, tokens.name, logits.name, longest, logits.shape[-1], manifest.encoder)

    @classmethod
    def for_requests(cls, manifest: Manifest) -> LanguageProgram:
        """Return that of a bundle whose steps are of several requests.

        Raises RunError for an encoder-decoder, and for sequences that are split: a step has the rows of all requests.
        """
        if manifest.encoder is not None:
            raise RunError(
                "expected a decoder-only model for steps of several requests, found an encoder-decoder",
                manifest.name,
                "generate one batch at a time: generate of the model, dr.load or dr.launch, or distir generate",
            )
        found = cls.of(manifest)
        if any(shard.dim == 1 for shard in manifest.inputs[0].shards):
            raise RunError(
                f"expected whole sequences on each device for steps of several requests, found {found.tokens!r} as "
                f"{manifest.inputs[0].placement}",
                manifest.name,
                "compile with rows=whole beside context, or generate one batch at a time",
            )
        return found

    def prompt(
        self, given: Any, tokenizer: Callable[[], Tokenizer], stop: Collection[int] | None = None,
        stop_text: Collection[str] = (), decoder_prompt: Sequence[int] | None = None,
    ) -> Prompt:  # fmt: skip
        """Return a prompt as for `Prompt.of`; for an encoder-decoder it is the input of the encoder.

        That is text or tokens, or an array of features, of one sequence or of several. The decoder begins with
        `decoder_prompt`, by default with the one token that the model begins with.

        Raises RunError as `Prompt.of` does, for tokens of `stop` that are not in the vocabulary, for features of
        another shape than the encoder's input, and for a `decoder_prompt` without encoder.
        """
        if stop is not None:
            self._check_tokens(stop_tokens(stop), "to stop at ")
        if self.encoder is None:
            if decoder_prompt is not None:
                raise RunError("expected no decoder_prompt for a model without encoder", self.name)
            return Prompt.of(given, tokenizer, stop, stop_text)
        if self.encoder.input.dtype == "int64":
            source = Prompt.of(given, tokenizer, stop, stop_text)
        else:
            source = features_prompt(given, self.encoder.input, stop)
        start, _ = token_ids([self.encoder.start] if decoder_prompt is None else decoder_prompt)
        return replace(source, ids=start.expand(len(source.ids), -1), encoder=source.ids)

    def check(self, prompt: torch.Tensor, count: int) -> None:
        """Raise RunError for more tokens than a sequence may have, and for unknown ones."""
        self._check_tokens((int(prompt.min()), int(prompt.max())))
        if not (isinstance(count, Integral) and count >= 0):
            raise RunError(f"expected a number of new tokens of at least 0, found {count!r}")
        self.check_length(prompt.shape[1], count)

    def _check_tokens(self, tokens: Collection[int], purpose: str = "") -> None:
        """Raise RunError for tokens that are not in the vocabulary."""
        unknown = [token for token in tokens if not 0 <= token < self.vocabulary]
        if unknown:
            raise RunError(
                f"expected token ids {purpose}from 0 to {self.vocabulary - 1}, found {unknown[0]}",
                hint="encode the text with the model's own tokenizer",
            )

    def check_length(self, prompt: int, count: int) -> None:
        """Raise RunError for a prompt of so many tokens that so many new ones are too many for a sequence."""
        if self.max_length is not None and prompt + count > self.max_length:
            raise RunError(
                f"expected at most {self.max_length} tokens, found a prompt of {prompt} and {count} new ones",
                hint="compile with a larger max_length, or ask for fewer tokens",
            )

    def inputs(self, tokens: torch.Tensor, past: int, encoder: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the inputs of a call by name: the first one for a sequence has that of the encoder, too."""
        if self.encoder is None or past:
            return {self.tokens: tokens}
        assert encoder is not None, "the prompt has an input of the encoder"
        return {self.encoder.input.name: encoder, self.tokens: tokens}

    def feed(
        self, run: Run, sampling: Sampling, timeout: float | None = None, encoder: torch.Tensor | None = None,
        world: World = ALONE,
    ) -> Continue:  # fmt: skip
        """Return the function that continues a sequence by calls of a session. It raises what these raise.

        In a launch every rank calls it, and the first one chooses for all: its draws count.
        """
        import torch

        sampler = SequenceSampler(sampling)

        def feed(tokens: torch.Tensor, past: int) -> torch.Tensor:
            outputs = run(self.inputs(tokens, past, encoder), timeout, [self.logits], past)
            chosen = sampler.next_tokens(outputs[self.logits], tokens, past).tolist() if outputs else None
            return torch.tensor(world.exchange(chosen, "the next token")[0])

        return feed
