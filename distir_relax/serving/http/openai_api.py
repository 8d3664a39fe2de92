"""Requests and responses of OpenAI's completions and chat completions, as far as the engine supports them."""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.errors import DistIRError, RunError
from distir_relax.runtime.generation import GREEDY, Sampling
from distir_relax.support import Fields
from distir_relax.support.fields import is_finite, shown

_MAX_STOPS = 16
_SAMPLING = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Fields of `Sampling` that are numbers, and have its defaults where the model has none."""
_OWN = ("model", "max_tokens", "temperature", *_SAMPLING, "top_k", "seed", "stop", "stream", "stream_options")
_OWN_OF_TEXT = (*_OWN, "prompt")
_OWN_OF_CHATS = (*_OWN, "messages", "max_completion_tokens", "chat_template_kwargs")
"""Fields that are implemented."""
_WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "cache_prompt", "parallel_tool_calls",
)  # fmt: skip
"""Fields that change no result, whatever their value: OpenAI's, and those of vLLM and llama.cpp."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("ignore_eos", "use_beam_search", "echo", "include_stop_str_in_output", "continue_final_message",
         "early_stopping"), (None, False),
    ),
    **dict.fromkeys(
        ("tools", "functions", "documents", "stop_token_ids", "allowed_token_ids", "bad_words", "guided_choice"),
        (None, []),
    ),
    **dict.fromkeys(("min_tokens", "top_a", "mirostat", "dynatemp_range", "priority", "top_logprobs"), (None, 0)),
    **dict.fromkeys(
        ("suffix", "guided_regex", "guided_grammar", "grammar", "chat_template", "reasoning_effort", "verbosity"),
        (None, ""),
    ),
    # An empty schema is that of any JSON, and empty options of a web search are its defaults.
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "json_schema", "web_search_options", "prediction", "audio",
         "prompt_logprobs", "truncate_prompt_tokens"), (None,),
    ),
    "logit_bias": (None, {}),
    **dict.fromkeys(("n", "best_of", "repeat_penalty", "typical_p", "tfs_z"), (None, 1)),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (None, True)),
    "length_penalty": (None, 1), "modalities": (None, ["text"]), "response_format": (None, {"type": "text"}),
}  # fmt: skip
"""Fields that are known and not implemented, with the values that change no result."""
_NEUTRAL_OF_TEXT = {**_NEUTRAL, "logprobs": (None,), "add_special_tokens": (None, True)}
_NEUTRAL_OF_CHATS = {**_NEUTRAL, "logprobs": (None, False), "add_special_tokens": (None, False)}
_NEUTRAL_OF_STREAMS = {"include_obfuscation": (None, False), "continuous_usage_stats": (None, False)}
_NEUTRAL_OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": (None, []), "function_call": (None,), "refusal": (None,), "audio": (None,), "annotations": (None, []),
}  # fmt: skip
_COUNTS = ("max_completion_tokens", "max_tokens")
_DEFAULT_COUNT, _DEFAULT_CHAT_COUNT = 16, 512
"""New tokens of a request that names no number. That of completions is OpenAI's; a chat ends by itself."""


_NO_DEFAULTS: Mapping[str, float] = {}


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
    variables: Mapping[str, Any]
    """Variables of the chat template."""


def parse_request(body: object, is_chat: bool, defaults: Mapping[str, float] = _NO_DEFAULTS) -> CompletionRequest:
    """Return a request from its JSON; `defaults` are the model's own settings (`Tokenizer.defaults`).

    Raises `InvalidRequest` for fields that are missing, of another type, or unsupported.
    """
    fields = Fields.of(body, InvalidRequest)
    if is_chat:
        _check_known(fields, (*_OWN_OF_CHATS, *_WITHOUT_EFFECT), _NEUTRAL_OF_CHATS)
    else:
        _check_known(fields, (*_OWN_OF_TEXT, *_WITHOUT_EFFECT), _NEUTRAL_OF_TEXT)
    fields.text_or_none("model")
    seed = _whole(fields, "seed", None)
    options = fields.fields("stream_options") if fields.table.get("stream_options") is not None else None
    if options is not None:
        _check_known(options, ("include_usage",), _NEUTRAL_OF_STREAMS)
    variables = fields.table.get("chat_template_kwargs")
    try:
        sampling = Sampling(
            temperature=_number(fields, "temperature", defaults.get("temperature", 1.0)),
            **{name: _number(fields, name, defaults.get(name, getattr(GREEDY, name))) for name in _SAMPLING},
            no_repeat_ngram_size=int(defaults.get("no_repeat_ngram_size", 0)),
            # -1 is vLLM's 0.
            top_k=0 if fields.table.get("top_k") == -1 else _whole(fields, "top_k", int(defaults.get("top_k", 0))),
            # Requests without a seed differ.
            seed=random.getrandbits(63) if seed is None else seed % (1 << 64),
        )
    except InvalidRequest:
        raise
    except DistIRError as error:
        raise InvalidRequest(error.message, hint=error.hint) from None
    count = _count(fields)
    return CompletionRequest(
        prompts=(_messages(fields),) if is_chat else _prompts(fields),
        is_chat=is_chat,
        count=count or int(defaults.get("max_new_tokens", _DEFAULT_CHAT_COUNT if is_chat else _DEFAULT_COUNT)),
        is_count_given=count is not None,
        sampling=sampling,
        stop=_stop(fields),
        is_stream=_flag(fields, "stream"),
        has_usage=options is not None and _flag(options, "include_usage"),
        variables={} if variables is None else Fields.of(variables, InvalidRequest, "", "chat_template_kwargs").table,
    )


def check_line(table: Mapping[str, Any], own: Collection[str]) -> None:
    """Raise `InvalidRequest` for an option of requests that a line of a file of prompts cannot have.

    `own` are the options that it can have. Other fields are taken, unless one is nearly spelled like an option.
    """
    neutral = _NEUTRAL_OF_CHATS if "messages" in table else _NEUTRAL_OF_TEXT
    others = {*_OWN_OF_TEXT, *_OWN_OF_CHATS} - {*own, "model"}
    unsupported = {name: v for name, v in neutral.items() if name not in own}
    _check_known(Fields.of(table, InvalidRequest), table, {**dict.fromkeys(others, (None, False, {})), **unsupported})
    options = {*own, *others, *neutral}
    for name in table.keys() - {*options, *_WITHOUT_EFFECT}:
        if near := difflib.get_close_matches(name, options, 1, 0.85):
            raise InvalidRequest(f"the field {name!r} is no option", hint=f"did you mean {near[0]!r}?")


def _check_known(fields: Fields, own: Collection[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raise `InvalidRequest` for a field that is not known, and for a value of one that is not supported."""
    for name, value in fields.table.items():
        if name in neutral:
            # 0 and 1 equal false and true; whichever a client sends, it means the same.
            if value not in neutral[name]:
                raise InvalidRequest(f"{name!r} is not supported, found {shown(value)}", hint="leave it out")
        elif name not in own:
            hint = "leave it out: a field that this server does not know may change the result"
            raise InvalidRequest(f"the field {name!r} is unknown, found {shown(value)}", hint=hint)


def _count(fields: Fields) -> int | None:
    counts = {fields.whole(name, 1) for name in _COUNTS if fields.table.get(name) is not None}
    if len(counts) > 1:
        raise InvalidRequest(f"expected one number of tokens, found two: {', '.join(_COUNTS)}", hint="give one of them")
    return counts.pop() if counts else None


def _messages(fields: Fields) -> list[dict[str, str]]:
    messages = []
    for row in fields.rows("messages"):
        _check_known(row, ("role", "content", "name"), _NEUTRAL_OF_MESSAGES)
        name = {} if row.table.get("name") is None else {"name": row.text("name")}
        messages.append({"role": row.text("role"), "content": _content(row), **name})
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


def _whole(fields: Fields, name: str, default: Any) -> Any:
    value = fields.table.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise fields.refuse("a whole number", name, value)
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


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
