"""Strict parsing of JSON and TOML: bounded nesting, finite numbers, valid Unicode.

Python's parsers recurse without limit, and accept ``NaN`` and lone surrogates.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import NoReturn

from distir_relax.errors import DistIRError
from distir_relax.support.fields import shown

MAX_DEPTH = 64
"""Maximum nesting of lists and tables. No format of this package needs ten."""


def parse_json(text: str | bytes, error: type[DistIRError], where: str = "") -> object:
    """Parse a JSON text. Raises `error`, with line and column, for text that is invalid or not UTF-8.

    Also refused: nesting deeper than `MAX_DEPTH`, ``NaN`` and infinities, duplicate keys, and lone surrogates.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as wrong:
            raise error(f"damaged: not UTF-8 at byte {wrong.start}", where) from None
    _check_depth(text, _JSON_MARK, error, where)

    def refuse(name: str) -> NoReturn:
        raise error(f"expected finite numbers, found {name}", where)

    def table(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for name, value in pairs:
            if name in result:
                raise error(f"duplicate key {shown(name)}", where)
            result[name] = value
        return result

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=table)
    except json.JSONDecodeError as wrong:
        raise error(f"not JSON: {wrong.msg}", f"{where}:{wrong.lineno}:{wrong.colno}") from None
    except ValueError as wrong:  # a number with more digits than Python reads
        raise error(f"not JSON: {wrong}", where) from None
    # Only an escape can produce a lone surrogate.
    if _SURROGATE.search(text):
        _check_encodable(value, error, where)
    return value


def parse_json_string(text: str, error: type[DistIRError], where: str = "") -> str:
    """Parse a JSON string. Raises `error` as `parse_json` does, and for another type of value."""
    try:
        value = parse_json(text, error)
    except DistIRError as wrong:
        # A position within the string does not help a reader of the file.
        raise error(wrong.message.replace("not JSON", "not a JSON string", 1), where) from None
    if not isinstance(value, str):
        raise error(f"expected a string, found {text[:20]!r}", where)
    return value


def parse_toml(text: str, error: type[DistIRError], where: str = "") -> dict[str, object]:
    """Parse a TOML text. Raises `error`, with line and column if Python reports them, for invalid text.

    Also refused: nesting deeper than `MAX_DEPTH`, and keys of more parts.
    """
    _check_depth(text, _TOML_MARK, error, where)
    if match := _LONG_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise error(f"expected keys of at most {MAX_DEPTH} parts, found a longer one", f"{where}:{line}")
    try:
        return tomllib.loads(text)
    except ValueError as wrong:  # `TOMLDecodeError`, and a number with more digits than Python reads
        raise error(f"not TOML: {wrong}", where) from None


# Matches a string up to its end or that of the text, as a whole, so that an unclosed one is scanned once.
_JSON_MARK = re.compile(r'"(?:[^"\\]|\\.?)*+"?|[\[{]|[\]}]', re.DOTALL)
_TOML_MARK = re.compile(
    r"""\#[^\n]*+|\"{3}(?:[^"\\]|\\.?|"{1,2}(?!"))*+"{0,5}|'{3}(?:[^']|'{1,2}(?!'))*+'{0,5}"""
    r"""|"(?:[^"\\\n]|\\.?)*+"?|'[^'\n]*+'?|[\[{]|[\]}]""",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"""(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}""")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _check_depth(text: str, mark: re.Pattern[str], error: type[DistIRError], where: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in mark.finditer(text):
        character = match.group()
        if character in ("[", "{"):
            depth += 1
        elif character in ("]", "}"):
            depth -= 1
        if depth > MAX_DEPTH:
            line = text.count("\n", 0, match.start()) + 1
            raise error(f"nested deeper than {MAX_DEPTH} lists and tables", f"{where}:{line}")


def _check_encodable(value: object, error: type[DistIRError], where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise error("expected text, found half of a character (a lone surrogate)", where) from None
