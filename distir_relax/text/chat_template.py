"""Chat templates: the Jinja templates that turn the messages of a chat into the text of a prompt.

A template comes with a model and is not trusted: it runs in Jinja's sandbox, on plain values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

from distir_relax.errors import RunError
from distir_relax.text.libraries import find_library

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat: ``{"role": "user", "content": "..."}``; a template may read further fields."""

_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template in the dialect of the transformers library. `where` is its file.

    `special_tokens` are its variables, such as ``bos_token``.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    where: str = ""

    def render(self, messages: Sequence[Message], reply: bool = True, variables: Mapping[str, Any] = _NONE) -> str:
        """Return the text of a chat; with `reply` it ends where the assistant's next message begins.

        `variables` are further ones of the template, such as ``enable_thinking``. Raises RunError for messages without
        a role and a content, for variables of other names than a template may use, and if the template refuses them or
        is invalid.
        """
        chat, template = [_plain(message) for message in messages], self._template
        if taken := {"messages", "tools", "documents", "add_generation_prompt", *self.special_tokens} & {*variables}:
            raise RunError(f"expected other variables of the chat template than {', '.join(sorted(taken))}")
        # As in transformers, templates see None where there are no tools and documents.
        given = {**self.special_tokens, "tools": None, "documents": None, **_plain_values(variables)}
        try:
            text: str = template.render(messages=chat, add_generation_prompt=reply, **given)
        except Exception as error:
            # The template is a program: any exception may leave it.
            raise RunError(f"the chat template does not take these messages: {_line(error)}", self.where) from None
        return text

    @cached_property
    def _template(self) -> Any:
        find_library("jinja2")
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols

        environment = _environment()
        environment.add_extension(loopcontrols)
        try:
            return environment.from_string(self.source)
        except (TemplateError, RecursionError, MemoryError) as error:
            raise RunError(f"the chat template is invalid: {_line(error)}", self.where) from None


def _plain(message: Any) -> Any:
    """Return a message rebuilt from plain values: methods of other objects are not for templates."""
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise RunError(
            f"expected messages with the texts role and content, found {message!r}",
            hint='for example: {"role": "user", "content": "Hello"}',
        )
    return _plain_values(message)


def _plain_values(table: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(table)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"expected messages of texts, numbers, lists and dicts: {error}") from None


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def _environment() -> Any:
    """Return the environment in which the transformers library renders templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag ``generation``, which marks text of the assistant for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PublicNamespace(Namespace):
        """A namespace without names that begin with an underscore: those of Python's internals."""

        def __init__(self, /, *values: Any, **more: Any) -> None:
            super().__init__()
            for name, value in dict(*values, **more).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"the name {name!r} is not allowed in a namespace")
            super().__setitem__(name, value)

    def refuse(message: object) -> NoReturn:
        raise TemplateError(str(message))

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        # Jinja's own escapes what HTML would not take.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation])
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=refuse,
        strftime_now=lambda text: datetime.now().strftime(text),
        namespace=PublicNamespace,
        dict=lambda *values, **more: dict(*values, **more),
    )
    return environment
