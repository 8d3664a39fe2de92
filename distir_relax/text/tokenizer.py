"""The tokenizer of a bundle, with the chat template and the tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from distir_relax.errors import BundleError, RunError
from distir_relax.support import Fields, parse_json
from distir_relax.support.fields import is_finite
from distir_relax.text.chat_template import ChatTemplate, Message
from distir_relax.text.incremental_decoder import IncrementalDecoder
from distir_relax.text.libraries import find_library

_TOKENIZER, _TEMPLATE, _SETTINGS = "tokenizer.json", "chat_template.jinja", "text.json"
_QUESTION: tuple[Message, ...] = ({"role": "user", "content": "question"},)
_ANSWER = "answer"
_NONE: Mapping[str, float] = {}
_WHOLE = ("top_k", "max_new_tokens", "no_repeat_ngram_size")
DEFAULTS = ("temperature", "top_p", "min_p", "repetition_penalty", *_WHOLE)
"""Settings of generation that a model may bring, as its folder's ``generation_config.json``."""


def text_files(
    tokenizer: str, special_tokens: Mapping[str, str], stop: Collection[int], template: str | None = None,
    defaults: Mapping[str, float] = _NONE,
) -> dict[str, str]:  # fmt: skip
    """Return the files of a bundle, by name, that `Tokenizer.of` reads.

    `tokenizer` is a ``tokenizer.json``, `special_tokens` are the variables of the chat template, `stop` the tokens
    that end a text, and `defaults` the model's settings of generation, of `DEFAULTS`.
    """
    settings = {"special_tokens": dict(special_tokens), "stop": sorted(stop), "defaults": dict(defaults)}
    files = {_TOKENIZER: tokenizer, _SETTINGS: json.dumps(settings, indent=1) + "\n"}
    return files if template is None else {**files, _TEMPLATE: template}


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the tokenizers library. Tokens of `stop` end a text; `template` is None without chats.

    `defaults` are the model's settings of generation, of `DEFAULTS`.
    """

    library: Any
    stop: frozenset[int] = frozenset()
    template: ChatTemplate | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(files: Mapping[str, str], folder: Path | None = None) -> Tokenizer | None:
        """Return the tokenizer of a bundle's files; None if it has none.

        Raises BundleError for files that are damaged, and RunError if the tokenizers library is not installed.
        """
        if _TOKENIZER not in files:
            return None
        places = {name: str(name if folder is None else folder / name) for name in (_TOKENIZER, _TEMPLATE, _SETTINGS)}
        library = _read(files[_TOKENIZER], places[_TOKENIZER])
        settings = Fields.of(
            parse_json(files.get(_SETTINGS, "{}"), BundleError, places[_SETTINGS]), BundleError, places[_SETTINGS]
        )
        stop, special = settings.wholes("stop"), settings.by_name("special_tokens")
        source = files.get(_TEMPLATE)
        template = None if source is None else ChatTemplate(source, special, places[_TEMPLATE])
        return Tokenizer(library, frozenset(stop), template, _defaults(settings))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the model expects around one, such as BOS.

        Raises RunError for text that is not Unicode.
        """
        return self._encode(text, True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; incomplete characters are U+FFFD."""
        text: str = self.library.decode(list(tokens), skip_special_tokens=True)
        return text

    def decoder(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """Return a decoder of the tokens that follow a prompt."""
        # Special tokens give no text, and hide where the text before them ends.
        return IncrementalDecoder(self.decode, [token for token in prompt if token not in self._special])

    def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the tokens of a chat, up to where the assistant's reply begins; `variables` are of the template.

        Raises RunError for a model without a chat template, and what `ChatTemplate.render` raises.
        """
        if self.template is None:
            raise RunError("the model has no chat template", hint="give the prompt as text")
        return self._encode(self.template.render(messages, variables=variables or {}), False)

    def encode_replies(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat up to the end of the assistant's last message, and which ones it writes.

        Those of a reply begin where it is generated, and end with the token that ends it. Raises RunError for a
        template that writes a message in another way once others follow, and as `encode_chat` does.
        """
        if self.template is None:
            raise RunError("the model has no chat template", hint="give a folder of a model for chats")
        replies = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        text = self.template.render(messages[: replies[-1] + 1], reply=False)
        tokens = self._encode(text, False)
        learned = [False] * len(tokens)
        for number in replies:
            ends = []
            for part in (self.template.render(messages[:number]), self.template.render(messages[: number + 1], False)):
                if not text.startswith(part):
                    raise RunError(
                        "the chat template writes earlier messages in another way once there are later ones",
                        self.template.where, "give conversations of one reply",
                    )  # fmt: skip
                # Characters at the end of a part may be one token with those after it.
                pairs = zip(self._encode(part, False), tokens, strict=False)
                ends.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            first, last = ends
            last = next((i + 1 for i in range(first, last) if tokens[i] in self.chat_stop), last)
            learned[first:last] = [True] * (last - first)
        end = len(learned) - learned[::-1].index(True) if any(learned) else len(tokens)
        return tokens[:end], learned[:end]

    @cached_property
    def chat_stop(self) -> frozenset[int]:
        """The tokens that end a reply: those of `stop`, and the one that the template sets after a reply."""
        if self.template is None:
            return self.stop
        try:
            chat = self.template.render([*_QUESTION, {"role": "assistant", "content": _ANSWER}], reply=False)
        except RunError:
            # A template may refuse such a chat, and take others.
            return self.stop
        first = self._encode(chat.rpartition(_ANSWER)[2].lstrip(), False)[:1]
        return self.stop.union(set(first) & self.library.get_added_tokens_decoder().keys())

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(id for id, token in self.library.get_added_tokens_decoder().items() if token.special)

    def _encode(self, text: str, whole: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RunError(f"expected text of Unicode characters, found {text!a}") from None
        ids: list[int] = self.library.encode(text, add_special_tokens=whole).ids
        return ids


def _defaults(settings: Fields) -> dict[str, float]:
    if "defaults" not in settings:
        return {}
    fields = settings.fields("defaults")
    if unknown := fields.table.keys() - set(DEFAULTS):
        raise fields.refuse(f"one of {', '.join(DEFAULTS)}", sorted(unknown)[0], "another setting")
    found: dict[str, float] = {}
    for name, value in fields.table.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_finite(value) or (name in _WHOLE and not is_whole):
            raise fields.refuse("a number", name, value)
        assert isinstance(value, (int, float))
        found[name] = value
    return found


def _read(content: str, where: str) -> Any:
    tokenizers = find_library("tokenizers")
    try:
        library = tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of the library is no Exception.
        raise BundleError(f"the tokenizer is damaged: {error}", where, "compile the model again") from None
    library.no_truncation()
    library.no_padding()
    return library
