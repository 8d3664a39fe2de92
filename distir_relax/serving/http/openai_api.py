"""Requests and responses of OpenAI's completions and chat completions, as far as the engine supports them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.generation import Sampling
from distir_relax.support import Fields
from distir_relax.support.fields import is_finite, shown

_MAX_STOPS = 16
# OpenAI's, and those of vLLM and llama.cpp that change a result.
_UNSUPPORTED = (
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "best_of", "tools", "functions", "response_format",
    "stop_token_ids", "ignore_eos", "min_tokens", "min_p", "bad_words", "use_beam_search", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema", "mirostat",
)  # fmt: skip
_IGNORED_UNLESS_SET = ("frequency_penalty", "presence_penalty", "logit_bias")
_REPETITIONS = ("repetition_penalty", "repeat_penalty")
_WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...] = (
    (_UNSUPPORTED, (None, False, [], 0, "", {"type": "text"})),
    (_IGNORED_UNLESS_SET, (None, 0, {})),
    (_REPETITIONS, (None, 1)),
)
"""Options that are not supported, each with the values that change no result."""
_DEFAULT_COUNT, _DEFAULT_CHAT_COUNT = 16, 512
"""New tokens of a request that names no number. That of completions is OpenAI's; a chat ends by itself."""


class InvalidRequest(RunError):
    """A request that the server does not take; answered with status 400."""


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed request: `prompts` are texts, token ids, or the messages of a chat.

    Without `is_count_given`, `count` is a default.
    """

    prompts: Sequence[Any]
    is_chat: bool
    count: int
    is_count_given: bool
    sampling: Sampling
    stop: tuple[str, ...]
    is_stream: bool
    has_usage: bool
    model: str


def parse_request(body: object, is_chat: bool) -> CompletionRequest:
    """Return a request from its JSON.

    Raises `InvalidRequest` for fields that are missing, of another type, or unsupported.
    """
    fields = Fields.of(body, InvalidRequest)
    for names, neutral in _WITHOUT_EFFECT:
        for name in names:
            if (value := fields.table.get(name)) not in neutral:
                raise InvalidRequest(f"{name!r} is not supported, found {shown(value)}", hint="leave it out")
    if fields.table.get("n") not in (None, 1):
        raise InvalidRequest(f"expected 1 for 'n', found {shown(fields.table['n'])}", hint="send several requests")
    seed = _number(fields, "seed", None)
    options = fields.fields("stream_options") if fields.table.get("stream_options") is not None else None
    try:
        sampling = Sampling(
            temperature=_number(fields, "temperature", 1.0),
            top_k=int(_number(fields, "top_k", 0)),
            top_p=_number(fields, "top_p", 1.0),
            # Requests without a seed differ.
            seed=random.getrandbits(63) if seed is None else int(seed) % (1 << 64),
        )
    except InvalidRequest:
        raise
    except DistIRError as error:
        raise InvalidRequest(error.message, hint=error.hint) from None
    count = _count(fields)
    return CompletionRequest(
        prompts=(_messages(fields),) if is_chat else _prompts(fields),
        is_chat=is_chat,
        count=count or (_DEFAULT_CHAT_COUNT if is_chat else _DEFAULT_COUNT),
        is_count_given=count is not None,
        sampling=sampling,
        stop=_stop(fields),
        is_stream=_flag(fields, "stream"),
        has_usage=options is not None and _flag(options, "include_usage"),
        model=fields.text("model", ""),
    )


def _count(fields: Fields) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if fields.table.get(name) is not None:
            return fields.whole(name, 1)
    return None


def _messages(fields: Fields) -> list[dict[str, str]]:
    messages = [{"role": row.text("role"), "content": _content(row)} for row in fields.rows("messages")]
    if not messages:
        raise fields.refuse("at least one message", "messages", [])
    return messages


def _content(row: Fields) -> str:
    """Return the text of a message: a string, or a list of parts that are all text."""
    content = row.table.get("content")
    if not isinstance(content, list):
        return row.text("content")
    parts = row.rows("content")
    for part in parts:
        if part.text("type") != "text":
            raise part.refuse("'text'", "type", part.table["type"])
    return "".join(part.text("text") for part in parts)


def _prompts(fields: Fields) -> list[Any]:
    prompt = fields.table.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    items = fields.items("prompt")
    if items and all(isinstance(item, str) for item in items):
        return list(items)
    if items and all(_is_token(item) for item in items):
        return [items]
    if items and all(isinstance(item, list) and item and all(map(_is_token, item)) for item in items):
        return list(items)
    raise fields.refuse("text or token ids, of one prompt or several", "prompt", prompt)


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 31


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.table.get("stop")
    texts = () if stop is None else (stop,) if isinstance(stop, str) else fields.texts("stop")
    if len(texts) > _MAX_STOPS or not all(texts):
        raise fields.refuse(f"at most {_MAX_STOPS} texts that are not empty", "stop", stop)
    return texts


def _number(fields: Fields, name: str, default: Any) -> Any:
    value = fields.table.get(name)
    if value is None:
        return default
    if not is_finite(value):
        raise fields.refuse("a number", name, value)
    return value


def _flag(fields: Fields, name: str) -> bool:
    return fields.table.get(name) is not None and fields.flag(name)


@dataclass(frozen=True)
class ResponseWriter:
    """The JSON of responses to one request, as a whole or in chunks."""

    identifier: str
    model: str
    created: int
    is_chat: bool

    def whole(self, texts: Sequence[str], reasons: Sequence[str], prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """Return a complete response."""
        choices = [
            {"index": i, **self._content(text), "finish_reason": reason, "logprobs": None}
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(prompt_tokens, tokens)}

    def chunk(self, index: int, text: str, reason: str | None = None, is_first: bool = False) -> dict[str, Any]:
        """Return a piece of a stream; the last one of a choice has the reason of its end."""
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            content: dict[str, Any] = {"delta": {**role, "content": text} if text or is_first else {}}
        else:
            content = {"text": text}
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [{"index": index, **content, "finish_reason": reason, "logprobs": None}]}

    def usage_chunk(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """Return the piece after the last one, with the numbers of tokens."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage(prompt_tokens, tokens)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identifier, "object": kind, "created": self.created, "model": self.model}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return the JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
