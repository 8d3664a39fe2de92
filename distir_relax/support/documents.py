"""JSON and TOML as plain values, whatever the text: nested so deep at most, with numbers and names that can be used.

Python's readers recurse into what they read, take ``NaN`` for a number and half of a character for a text.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import NoReturn

from distir_relax.errors import DistIRError
from distir_relax.support.fields import shown

MAX_DEPTH = 64
"""How deep lists and tables may be nested. No format of this package needs ten."""


def parse_json(text: str | bytes, error: type[DistIRError], where: str = "") -> object:
    """The value of a JSON text. Raises `error`, with line and column, for anything that is none or not UTF-8.

    Refused besides: nesting deeper than `MAX_DEPTH`, ``NaN`` and infinities, a key given twice, and lone surrogates.
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
        found: dict[str, object] = {}
        for name, value in pairs:
            if name in found:
                raise error(f"the key {shown(name)} is given twice", where)
            found[name] = value
        return found

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=table)
    except json.JSONDecodeError as wrong:
        raise error(f"not JSON: {wrong.msg}", f"{where}:{wrong.lineno}:{wrong.colno}") from None
    except ValueError as wrong:  # a number of more digits than Python reads
        raise error(f"not JSON: {wrong}", where) from None
    # Only an escape can bring in half of a character.
    if _SURROGATE.search(text):
        _check_encodable(value, error, where)
    return value


def parse_json_string(text: str, error: type[DistIRError], where: str = "") -> str:
    """The text that a JSON string stands for. Raises `error` as `parse_json` does, and for another value."""
    try:
        value = parse_json(text, error)
    except DistIRError as wrong:
        # A place within the string says nothing to who looks at the file.
        raise error(wrong.message.replace("not JSON", "not a JSON string", 1), where) from None
    if not isinstance(value, str):
        raise error(f"expected a string, found {text[:20]!r}", where)
    return value


def parse_toml(text: str, error: type[DistIRError], where: str = "") -> dict[str, object]:
    """The table that a TOML text describes. Raises `error`, with line and column where Python tells, for another text.

    Refused besides: what is nested deeper than `MAX_DEPTH`, or named by a key of so many parts.
    """
    _check_depth(text, _TOML_MARK, error, where)
    if match := _LONG_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise error(f"expected keys of at most {MAX_DEPTH} parts, found a longer one", f"{where}:{line}")
    try:
        return tomllib.loads(text)
    except ValueError as wrong:  # `TOMLDecodeError`, and a number of more digits than Python reads
        raise error(f"not TOML: {wrong}", where) from None


# In a string, to its end or that of the text; taken whole, so that an unclosed one is scanned once.
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
        found = match.group()
        if found in ("[", "{"):
            depth += 1
        elif found in ("]", "}"):
            depth -= 1
        if depth > MAX_DEPTH:
            line = text.count("\n", 0, match.start()) + 1
            raise error(f"nested deeper than {MAX_DEPTH} lists and tables", f"{where}:{line}")


def _check_encodable(value: object, error: type[DistIRError], where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise error("expected text, found half of a character (a lone surrogate)", where) from None
