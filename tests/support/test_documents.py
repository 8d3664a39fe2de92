"""JSON, TOML and fields: what Python's readers choke on is refused with a place."""

from __future__ import annotations

import re

import pytest

from distir_relax.errors import ParseError
from distir_relax.support import Fields, parse_json, parse_toml, shown

DEEP = 200_000


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * DEEP + "]" * DEEP, "f:1: nested deeper than 64"),
        ('{"a":' * DEEP, "f:1: nested deeper than 64"),
        ('"' + '\\"' * DEEP, "f:1:1: not JSON: Unterminated string"),
        ('"' * DEEP, "f:1:3: not JSON: Extra data"),
        ("[" + "[]," * DEEP + "1", "not JSON"),
        ('{"a": 1,\n "b": ?}', "f:2:7: not JSON: Expecting value"),
        ("[NaN]", "f: expected finite numbers, found NaN"),
        ("-Infinity", "f: expected finite numbers, found -Infinity"),
        ("1" * 5000, "f: not JSON: Exceeds the limit"),
        ('{"a": 1, "a": 2}', "f: duplicate key 'a'"),
        ('["\\ud800"]', "f: expected text, found half of a character"),
        (b'{"a": "\xff"}', "f: damaged: not UTF-8 at byte 7"),
        ("", "f:1:1: not JSON: Expecting value"),
    ],
)
def test_json_that_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ParseError, match=re.escape(message)):
        parse_json(text, ParseError, "f")


def test_json_that_is_read() -> None:
    nested = "[" * 64 + "]" * 64
    assert str(parse_json(nested, ParseError)) == nested
    brackets = '{"a": "' + "[" * 100 + '", "b": "\\ud83d\\ude00"}'
    assert parse_json(brackets, ParseError) == {"a": "[" * 100, "b": "\N{GRINNING FACE}"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * DEEP, "f:1: nested deeper than 64"),
        ('a = ["""\n""", ' + "[" * 5000, "f:2: nested deeper than 64"),
        ("a = ['''\n''', " + "[" * 5000, "f:2: nested deeper than 64"),
        (".".join("a" * DEEP) + " = 1", "f:1: expected keys of at most 64 parts"),
        ("\n[" + ".".join(['"a"'] * 100) + "]", "f:2: expected keys of at most 64 parts"),
        ("a = " + "1" * 5000, "f: not TOML: Exceeds the limit"),
        ("a = ", "f: not TOML: Invalid value"),
    ],
)
def test_toml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=re.escape(message)):
        parse_toml(text, ParseError, "f")


def test_toml_that_is_read() -> None:
    text = f'# {"[" * 99}\na = """\n{"[" * 99}"""\nb = "{"[" * 99}"\nc = \'{"{" * 99}\'\n[[d]]\ne = [{{f = 1.5}}]\n'
    assert parse_toml(text, ParseError) == {
        "a": "[" * 99, "b": "[" * 99, "c": "{" * 99, "d": [{"e": [{"f": 1.5}]}],
    }  # fmt: skip


def test_fields_name_what_is_wrong_with_its_path() -> None:
    rows = Fields.of({"rows": [{"n": 1}, {"n": True}, {"n": 2**63}, {"t": 3}]}, ParseError, "f").rows("rows")
    assert rows[0].whole("n") == 1
    with pytest.raises(ParseError, match=re.escape("f (rows[1].n): expected a whole number of at least 0 for 'n', fo")):
        rows[1].whole("n")
    with pytest.raises(ParseError, match="found 9223372036854775808"):
        rows[2].whole("n")
    with pytest.raises(ParseError, match=re.escape("f (rows[3]): the field 'n' is missing")):
        rows[3].whole("n")
    with pytest.raises(ParseError, match="expected text for 't', found 3"):
        rows[3].text("t")
    with pytest.raises(ParseError, match="expected a table, found 'x'"):
        Fields.of("x", ParseError)


def test_whatever_is_shown_is_short() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, 1 << 10**6, {"a": [1 << 10**5]}):
        assert len(shown(value)) < 200
