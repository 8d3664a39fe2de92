"""Prompts as users give them: text, the messages of a chat, or tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Tensor
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import torch_dtype
from distir_relax.runtime.generation.sampling import Sampling, sampling_of
from distir_relax.text import StopStrings, Tokenizer

if TYPE_CHECKING:
    import torch


DEFAULT_NEW_TOKENS = 64
"""New tokens of a call that names no number, for a model without settings of its own."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as int64 tokens, (batch, length), and the tokens that end what follows it.

    With a `tokenizer` the result is text, up to one of `stop_text`: the prompt was a text or a chat. For an
    encoder-decoder, `encoder` is the input of the encoder, and `ids` are the tokens that the decoder begins with.
    """

    ids: torch.Tensor
    is_batch: bool
    stop: frozenset[int]
    tokenizer: Tokenizer | None = None
    stop_text: tuple[str, ...] = ()
    encoder: torch.Tensor | None = None

    def settings(self, count: int | None, sampling: Mapping[str, Any]) -> tuple[int, Sampling]:
        """Return the number of new tokens and the sampling: as given, or for text by the model's own settings.

        Raises RunError for unknown options of sampling, and for values that it does not take.
        """
        defaults = self.tokenizer.defaults if self.tokenizer is not None else {}
        if count is None:
            count = int(defaults.get("max_new_tokens", DEFAULT_NEW_TOKENS))
        return count, sampling_of(sampling, defaults)

    @staticmethod
    def of(
        prompt: Any, tokenizer: Callable[[], Tokenizer], stop: Collection[int] | None = None,
        stop_text: Collection[str] = (),
    ) -> Prompt:  # fmt: skip
        """Return a prompt. `tokenizer` is called for a text, and for a chat: a list of messages.

        Without `stop`, a text ends at the tokens of the model that end one, a chat at those that end a reply too.
        Raises `RunError` for a prompt without tokens, one that is not the token ids of one sequence or of several of
        one length, messages that the model does not take, `stop` that is not token ids, stop texts that are empty or
        for tokens, and what `tokenizer` raises.
        """
        ends = None if stop is None else stop_tokens(stop)
        texts = _texts(stop_text)
        is_chat = isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)
        if not is_chat and not isinstance(prompt, str):
            if texts:
                raise RunError("stop texts are for prompts of text, found tokens", hint="give tokens to stop at")
            return Prompt(*token_ids(prompt), ends or frozenset())
        StopStrings(texts)
        by = tokenizer()
        ids, _ = token_ids(by.encode_chat(prompt) if is_chat else by.encode(prompt))
        if ends is None:
            ends = by.chat_stop if is_chat else by.stop
        return Prompt(ids, False, ends, by, texts)


def is_list_of_prompts(prompt: Any) -> bool:
    """Return whether a prompt is several: texts, chats, or token ids of several lengths."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        return False
    if all(isinstance(each, str) for each in prompt):
        return True
    if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in prompt):
        return False
    is_chat = all(each and all(isinstance(message, Mapping) for message in each) for each in prompt)
    return is_chat or len({len(each) for each in prompt}) > 1


def features_prompt(given: Any, tensor: Tensor, stop: Collection[int] | None = None) -> Prompt:
    """Return a prompt of features: an array like `tensor`, with a batch dim or without.

    Raises `RunError` for another number of dims.
    """
    import torch

    rank = len(tensor.shape)
    found = f"{given!r}" if isinstance(given, str) else type(given).__name__
    try:
        features = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        features = None
    if features is None or features.ndim not in (rank - 1, rank):
        found = found if features is None else f"{features.dtype} of shape {tuple(features.shape)}"
        raise RunError(f"expected features for the input {tensor.name}, {tensor.dtype} {tensor.shape}, found {found}")
    is_batch = features.ndim == rank
    features = (features if is_batch else features[None]).to("cpu", torch_dtype(tensor.dtype))
    return Prompt(features, is_batch, stop_tokens(stop or ()))


def stop_tokens(stop: Collection[int]) -> frozenset[int]:
    """Return the token ids that end a sequence. Raises `RunError` for other values."""
    try:
        return frozenset(map(index, stop))
    except TypeError:
        raise RunError(
            f"expected token ids to stop at, such as {{2, 7}}, found {stop!r}", hint="stop_text takes texts"
        ) from None


def _texts(stop_text: Collection[str]) -> tuple[str, ...]:
    """Return stop texts. Raises `RunError` for another kind of value."""
    if not isinstance(stop_text, Collection):
        raise RunError(f"expected stop texts, found {stop_text!r}", hint='for example: stop_text=["END"]')
    return (stop_text,) if isinstance(stop_text, str) else tuple(stop_text)


def token_ids(prompt: Any) -> tuple[torch.Tensor, bool]:
    """Return int64 tokens, (batch, length), and whether they are a batch. Raises `RunError` for other values."""
    import torch

    if isinstance(prompt, Sequence) and all(isinstance(p, Sequence) and not isinstance(p, str) for p in prompt):
        lengths = sorted({len(p) for p in prompt})
        if len(lengths) > 1:
            raise RunError(
                f"expected prompts of one length, found {', '.join(map(str, lengths))}",
                hint="generate from them one by one",
            )
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"expected text, messages or token ids, found {prompt!r}: {error}") from None
    if not ids.numel():
        raise RunError("expected a prompt of at least one token, found none", hint="begin with the model's BOS token")
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim not in (1, 2):
        raise RunError(f"expected token ids of one sequence or a batch, found {ids.dtype} of shape {tuple(ids.shape)}")
    return (ids if ids.ndim == 2 else ids[None]).to("cpu", torch.int64), ids.ndim == 2
