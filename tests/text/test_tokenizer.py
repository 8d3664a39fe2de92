"""Tokenizers of bundles: text and tokens as in transformers, streams of pieces, chats, stop strings, damaged files."""

from __future__ import annotations

import random
import re
import sys
from typing import Any

import pytest

from distir_relax.errors import BundleError, RunError
from distir_relax.text import ChatTemplate, StopStrings, Tokenizer, text_files
from tests.tokenizers_of_tests import CHAT, of_bytes, of_pieces, of_transformers

# Characters of two, three and four bytes; a family of people is several, joined.
TEXTS = [
    "",
    "a",
    "the night train was late",
    "  two spaces,\n\tand a tab ",
    "caf\u00e9 \u20ac 15 \u65e5\u672c\u8a9e",
    "\U0001f600 smile \U0001f468\u200d\U0001f469\u200d\U0001f467 family\U0001f1e9\U0001f1ea",
    "<|user|> is special</s> here",
    "a \ufffd b",
]
CHATS = [
    [{"role": "user", "content": "how do I bake bread?"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "caf\u00e9 \U0001f600"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "</s>"}],
]


def tokenizer_of(library: Any, template: str | None = CHAT) -> Tokenizer:
    files = text_files(library.to_str(), {"bos_token": "<s>", "eos_token": "</s>"}, [1], template)
    tokenizer = Tokenizer.of(files)
    assert tokenizer is not None
    return tokenizer


LIBRARIES = {"bytes": of_bytes, "pieces": of_pieces}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]()


def streamed(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] = []) -> list[str]:  # noqa: B006
    decoder = tokenizer.decoder(prompt)
    return [*map(decoder.feed, tokens), decoder.finish()]


def test_tokens_and_text_are_those_of_transformers(library: Any) -> None:
    found, expected = tokenizer_of(library), of_transformers(library)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == expected(text).input_ids
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_chats_are_those_of_transformers(library: Any) -> None:
    found, expected = tokenizer_of(library), of_transformers(library)
    for chat in CHATS:
        assert found.encode_chat(chat) == expected.apply_chat_template(chat, add_generation_prompt=True).input_ids
        assert found.template is not None
        for reply in (False, True):
            text = expected.apply_chat_template(chat, tokenize=False, add_generation_prompt=reply)
            assert found.template.render(chat, reply) == text
    assert found.chat_stop == {1, 3}
    assert tokenizer_of(library, None).chat_stop == {1}
    assert tokenizer_of(library, "{{ messages[0]['content'] }}").chat_stop == {1}


def test_pieces_add_up_and_have_whole_characters(library: Any) -> None:
    tokenizer = tokenizer_of(library)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        pieces = streamed(tokenizer, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens)
        assert "\ufffd" not in "".join(pieces).replace("a \ufffd b", "")
        # After a prompt, a stream has the space that a text would begin without.
        for cut in range(1, len(tokens)):
            before = tokenizer.decode(tokens[:cut])
            if "\ufffd" not in before:
                assert before + "".join(streamed(tokenizer, tokens[cut:], tokens[:cut])) == tokenizer.decode(tokens)


def test_streams_of_random_bytes_are_the_text_of_all() -> None:
    tokenizer, draw = tokenizer_of(of_bytes()), random.Random(0)
    for _ in range(50):
        tokens = [draw.randrange(311) for _ in range(40)]
        assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_streams_of_random_characters_by_bytes() -> None:
    tokenizer, draw = tokenizer_of(of_pieces()), random.Random(0)
    for _ in range(50):
        characters = "".join(draw.choice("ab \u00e9\u20ac\u65e5\U0001f600\U0001f9d1") for _ in range(12))
        tokens = tokenizer.encode(characters)
        pieces = streamed(tokenizer, tokens)
        assert "".join(pieces) == characters
        assert max(map(len, pieces)) <= 3


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = tokenizer_of(of_bytes())
    tokens = tokenizer.encode("\U0001f600")[1:]
    assert len(tokens) == 4
    assert streamed(tokenizer, tokens) == ["", "", "", "\U0001f600", ""]
    assert streamed(tokenizer, tokens[:2]) == ["", "", "\ufffd"]


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is not none %}tools{% endif %}{% if documents is defined %}documents{% endif %}",
        "{{ tools | tojson }} {{ documents | tojson(indent=2) }}",
        "{% if enable_thinking is defined and not enable_thinking %}{{ style }}{% endif %}",
    ],
)
def test_templates_see_the_variables_of_transformers(source: str) -> None:
    messages, variables = [{"role": "user", "content": "hi"}], {"enable_thinking": False, "style": ["a", 1]}
    expected = of_transformers(of_bytes()).apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True, **variables
    )
    assert ChatTemplate(source).render(messages, variables=variables) == expected
    with pytest.raises(RunError, match="other variables of the chat template than bos_token, tools"):
        ChatTemplate(source, {"bos_token": "x"}).render(messages, variables={"tools": [], "bos_token": ""})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_stop_strings_in_pieces_of_any_size(size: int) -> None:
    text = "one two ##three\n\nfour ### five"
    for stops in (["###"], ["\n\n", "###"], ["two", "wo #"], ["ee\n\nf"], ["six"], [], ["one"], ["##t", "#"]):
        filter_ = StopStrings(stops)
        found = ""
        for start in range(0, len(text), size):
            if not filter_.is_reached:
                found += filter_.feed(text[start : start + size])
        found += filter_.finish()
        expected = re.split("|".join(map(re.escape, stops)), text, maxsplit=1) if stops else [text]
        assert (found, filter_.is_reached) == (expected[0], len(expected) > 1)


def test_stop_strings_hold_only_what_may_become_one() -> None:
    filter_ = StopStrings(["\nUser:"])
    assert [filter_.feed(piece) for piece in ("hello", "\nUs", "age", "\n", "User: x")] == [
        "hello", "", "\nUsage", "", ""
    ]  # fmt: skip
    with pytest.raises(RunError, match="expected stop texts of at least one character, found ''"):
        StopStrings([""])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "chat_template.jinja: the chat template is invalid: "),
        ("{{ messages[0].content.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "the name '_x' is not allowed in a namespace"),
        ("{{ namespace(__class__=1) }}", "the name '__class__' is not allowed in a namespace"),
        ("{{ dict.__globals__.x }}", "is unsafe"),
        ("{{ raise_exception('no system messages') }}", "does not take these messages: no system messages"),
        ("{{ 1 / 0 }}", "does not take these messages: division by zero"),
        ("{{ messages[0].nothing.more }}", "does not take these messages: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not take these messages: maximum recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% include 'secrets.txt' %}", "does not take these messages: "),
    ],
)
def test_templates_that_are_invalid_or_hostile(source: str, message: str) -> None:
    template = ChatTemplate(source, where="chat_template.jinja")
    with pytest.raises(RunError) as refused:
        template.render([{"role": "user", "content": "hello"}])
    assert message in str(refused.value)


def test_a_template_has_the_functions_of_transformers() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%%') }}{% set n = namespace(a=1) %}{% set n.b = 2 %}{{ n.a + n.b }}{{ dict(x=1) | tojson }}"
    )
    messages = [{"role": "user", "content": "<caf\u00e9>"}] * 2
    expected = of_transformers(of_bytes()).apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(messages) == expected


@pytest.mark.parametrize("message", [{"role": "user"}, "hello", {"role": 3, "content": "x"}, {"content": "x"}])
def test_messages_that_are_none(message: Any) -> None:
    with pytest.raises(RunError, match="expected messages with the texts role and content, found "):
        ChatTemplate(CHAT).render([message])


def test_values_that_templates_may_not_see() -> None:
    with pytest.raises(RunError, match="expected messages of texts, numbers, lists and dicts: "):
        ChatTemplate(CHAT).render([{"role": "user", "content": "x", "image": object()}])


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(RunError, match=r"expected text of Unicode characters, found '\\udcff'"):
        tokenizer_of(of_bytes()).encode("\udcff")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json: the tokenizer is damaged: "),
        ({"tokenizer.json": '{"model": {"type": "None"}}'}, "tokenizer.json: the tokenizer is damaged: "),
        ({"tokenizer.json": "[" * 100_000}, "tokenizer.json: the tokenizer is damaged: "),
        ({"text.json": "{"}, "text.json:1:2: not JSON"),
        ({"text.json": '{"stop": ["x"]}'}, "text.json (stop[0])"),
        ({"text.json": '{"stop": [], "special_tokens": {"bos_token": 3}}'}, "text.json (special_tokens.bos_token)"),
        ({"text.json": "{}"}, "text.json: the field 'stop' is missing"),
    ],
)
def test_damaged_files(files: dict[str, str], message: str) -> None:
    whole = text_files(of_bytes().to_str(), {}, [1])
    with pytest.raises(BundleError) as refused:
        Tokenizer.of({**whole, **files})
    assert message in str(refused.value)
    assert Tokenizer.of({}) is None


@pytest.mark.parametrize("library", ["tokenizers", "jinja2"])
def test_without_the_libraries_the_error_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = text_files(of_bytes().to_str(), {}, [], CHAT)
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"{library}, which text needs, .*\n  hint: pip install 'distir-relax\[text\]'"
    with pytest.raises(RunError, match=message):
        _encoded_chat(files)


def _encoded_chat(files: dict[str, str]) -> list[int]:
    tokenizer = Tokenizer.of(files)
    assert tokenizer is not None
    return tokenizer.encode_chat(CHATS[0])
