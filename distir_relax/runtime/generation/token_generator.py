"""Generation in Python: prompts of text, messages or tokens in, text or tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from distir_relax.errors import RunError
from distir_relax.runtime.generation.prompt import Prompt, is_list_of_prompts
from distir_relax.runtime.generation.results import bundle_tokenizer, stream_results, whole_result
from distir_relax.runtime.generation.sampling import Sampling
from distir_relax.runtime.generation.token_loop import LanguageProgram, Run, generated_tokens
from distir_relax.text import Message, Tokenizer

if TYPE_CHECKING:
    import torch


class TokenOptions(TypedDict, total=False):
    """Options of a `TokenGenerator`: those of `Sampling`, and of a plan's call.

    By default sampling is that of the model's own settings for text and chats, greedy without them and for tokens.
    Without a `seed`, draws differ from call to call.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    stop: Collection[int] | None
    """Tokens that end a sequence; by default those of the model for text, none for tokens."""
    stop_text: Collection[str]
    """Texts that end a text, without being part of it; none by default."""
    decoder_prompt: Sequence[int] | None
    """For an encoder-decoder: tokens that its decoder begins with; by default the model's first one."""
    backend: str
    timeout: float | None


class TokenGenerator(ABC):
    """A language model that continues text and tokens: `_tokens` makes them, while a caller has the `_turn`."""

    def __init__(self, texts: Mapping[str, str], path: Path | None, name: str) -> None:
        self._files = texts, path, name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `RunError` for a bundle that has none."""
        return bundle_tokenizer(*self._files)

    def generate(
        self, prompt: Any, max_new_tokens: int | None = None, *, stream: bool = False, **options: Unpack[TokenOptions]
    ) -> Any:
        """Return the text, or the tokens, that follow a prompt, with ranks as threads of this process.

        `prompt` is a text, a list of the messages of a chat (`chat`), a sequence of token ids, or a batch of them of
        one length, as integers, an array or a tensor. The result is text for a text or a chat, without special tokens
        and the stop text; for tokens an int64 tensor of the same number of dims. It ends after `max_new_tokens`, by
        default those of the model's own settings or 64, or when every sequence of the batch has reached a token of
        `stop`; one that has it before repeats it. The result is the same on any number of ranks. With `stream` it is an
        iterator instead, that of the method `stream`.

        Of a list of texts, of chats, or of token ids of several lengths the result is a list: each prompt is continued
        by itself, and where the program allows it several in one step, by an `engine`.

        For an encoder-decoder the prompt is the input of the encoder, tokens or an array of features, and the result
        the tokens of the decoder after those it begins with.

        Raises `RunError` for a prompt without tokens, one that is too long, or of another kind, for text without a
        tokenizer, and for invalid options.
        """
        if stream:
            return self.stream(prompt, max_new_tokens, **options)
        if is_list_of_prompts(prompt):
            return self._generate_each(prompt, max_new_tokens, options)
        given, results = self._start(prompt, max_new_tokens, **options)
        with self._turn():
            return whole_result(results, given)

    def stream(self, prompt: Any, max_new_tokens: int | None = None, **options: Unpack[TokenOptions]) -> Iterator[Any]:
        """Yield the result of `generate` as it is made.

        For text these are pieces of it, of whole characters; for tokens a number, or for a batch a tensor with one of
        each sequence. Calls from other threads wait until the iterator has ended or is closed; one of the same thread
        is an error.
        """
        _, results = self._start(prompt, max_new_tokens, **options)
        with self._turn():
            yield from results

    def chat(
        self, messages: str | Sequence[Message], max_new_tokens: int | None = None, **options: Unpack[TokenOptions]
    ) -> str:
        """Return the reply to the messages of a chat, or to one message of the user.

        Messages are dicts: ``{"role": "user", "content": "Hello"}``. The model's chat template writes the prompt.

        Raises `RunError` as `generate` does, for a model without a template, and messages that it does not take.
        """
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(chat, Sequence) or not chat or not all(isinstance(message, Mapping) for message in chat):
            raise RunError(
                f"expected text, or messages with role and content, found {messages!r}",
                hint='for example: [{"role": "user", "content": "Hello"}]',
            )
        reply: str = self.generate(chat, max_new_tokens, **options)
        return reply

    @abstractmethod
    def _turn(self) -> AbstractContextManager[None]:
        """Return a context in which the caller alone generates."""

    @abstractmethod
    def _language(self, backend: str | None) -> LanguageProgram:
        """Return the program, as `backend` runs it. Raises `RunError` for one that does not continue sequences."""

    @abstractmethod
    def _runs(self, backend: str | None) -> Run:
        """Return the function that runs the program on `backend`."""

    def _tokens(
        self, prompt: Prompt, count: int, sampling: Sampling, timeout: float | None, backend: str | None
    ) -> Generator[torch.Tensor]:
        """Yield the tokens after a prompt, as `generated_tokens` does."""
        program = self._language(backend)
        program.check(prompt.ids, count)
        feed = program.feed(self._runs(backend), sampling, timeout, prompt.encoder)
        yield from generated_tokens(feed, prompt.ids, count, prompt.stop)

    def _generate_each(self, prompts: Sequence[Any], max_new_tokens: int | None, options: TokenOptions) -> list[Any]:
        """Return the results of several prompts."""
        return [self.generate(each, max_new_tokens, **options) for each in prompts]

    def _start(self, prompt: Any, count: int | None, **options: Unpack[TokenOptions]) -> tuple[Prompt, Iterator[Any]]:
        """Return the prompt, and the results of `stream`."""
        backend, timeout = options.get("backend"), options.get("timeout")
        given, count, sampling = self._settings(prompt, count, options)
        return given, stream_results(self._tokens(given, count, sampling, timeout, backend), given)

    def _settings(self, prompt: Any, count: int | None, options: TokenOptions) -> tuple[Prompt, int, Sampling]:
        """Return the prompt, the number of new tokens, and how they are sampled."""
        language = self._language(options.get("backend"))
        of_prompt = (options.get("stop"), options.get("stop_text") or (), options.get("decoder_prompt"))
        given = language.prompt(prompt, lambda: self.tokenizer, *of_prompt)
        others = ("stop", "stop_text", "decoder_prompt", "backend", "timeout")
        return given, *given.settings(count, {name: x for name, x in options.items() if name not in others})
