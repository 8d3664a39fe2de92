"""Typed access to fields of JSON and TOML tables, with errors that name the field's path."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from distir_relax.errors import DistIRError

MOST = 2**63 - 1
"""The largest integer that a field may hold: an int64."""


@dataclass(frozen=True, slots=True)
class _Missing:
    """Sentinel for a field without a default."""


_MISSING = _Missing()


@dataclass(frozen=True)
class Fields:
    """A table read from a file. `error` is the exception to raise, `where` the file, `path` the table's place in it.

    Each method returns one field; all raise `error` if it has another type, or is missing without a default.
    """

    table: Mapping[str, object]
    error: type[DistIRError]
    where: str = ""
    path: str = ""

    @classmethod
    def of(cls, value: object, error: type[DistIRError], where: str = "", path: str = "") -> Fields:
        """Return `value` as a table. Raises `error` if it is something else."""
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise error(f"expected a table, found {shown(value)}", _place(where, path))
        return cls(value, error, where, path)

    def __contains__(self, key: str) -> bool:
        return key in self.table

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, _MISSING if default is None else default)
        return value if isinstance(value, str) else self._refuse("text", key, value)

    def text_or_none(self, key: str) -> str | None:
        """Return a string; None if it is null or missing."""
        value = self._value(key, None)
        return value if value is None or isinstance(value, str) else self._refuse("text", key, value)

    def whole(self, key: str, least: int = 0) -> int:
        """Return an int64 of at least `least`."""
        return self._whole(key, self._value(key, _MISSING), least)

    def flag(self, key: str) -> bool:
        """Return a truth value."""
        value = self._value(key, _MISSING)
        return value if isinstance(value, bool) else self._refuse("true or false", key, value)

    def items(self, key: str, default: list[object] | None = None) -> list[object]:
        """Return a list with items of any type."""
        value = self._value(key, _MISSING if default is None else default)
        return value if isinstance(value, list) else self._refuse("a list", key, value)

    def texts(self, key: str, default: list[object] | None = None) -> tuple[str, ...]:
        """Return a list of strings."""
        texts = []
        for number, value in enumerate(self.items(key, default)):
            texts.append(value if isinstance(value, str) else self._refuse("text", f"{key}[{number}]", value))
        return tuple(texts)

    def wholes(self, key: str) -> tuple[int, ...]:
        """Return a list of non-negative int64 numbers."""
        return tuple(self._whole(f"{key}[{i}]", value, 0) for i, value in enumerate(self.items(key)))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        found: list[float] = []
        for number, value in enumerate(self.items(key)):
            if not is_finite(value):
                self._refuse("a number", f"{key}[{number}]", value)
            assert isinstance(value, (int, float))
            found.append(value)
        return tuple(found)

    def fields(self, key: str) -> Fields:
        """Return a nested table."""
        return Fields.of(self._value(key, _MISSING), self.error, self.where, self._join(key))

    def rows(self, key: str, default: list[object] | None = None) -> list[Fields]:
        """Return a list of tables."""
        return [
            Fields.of(value, self.error, self.where, f"{self._join(key)}[{i}]")
            for i, value in enumerate(self.items(key, default))
        ]

    def by_name(self, key: str) -> dict[str, str]:
        """Return a table of strings; empty if it is missing."""
        inner = Fields.of(self._value(key, {}), self.error, self.where, self._join(key))
        return {name: inner.text(name) for name in inner.table}

    def wholes_by_name(self, key: str) -> dict[str, int]:
        """Return a table of non-negative int64 numbers."""
        inner = self.fields(key)
        return {name: inner.whole(name) for name in inner.table}

    def refuse(self, expected: str, key: str, found: object) -> DistIRError:
        """Return the error to raise for an unexpected field."""
        return self.error(f"expected {expected} for {key!r}, found {shown(found)}", _place(self.where, self._join(key)))

    def _value(self, key: str, default: object) -> object:
        value = self.table.get(key, default)
        if value is _MISSING:
            raise self.error(f"the field {key!r} is missing", _place(self.where, self.path))
        return value

    def _whole(self, key: str, value: object, least: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST:
            return value
        return self._refuse(f"a whole number of at least {least}", key, value)

    def _refuse(self, expected: str, key: str, found: object) -> NoReturn:
        raise self.refuse(expected, key, found)

    def _join(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def is_finite(value: object) -> bool:
    """Whether a value is a number, not a bool, that a float64 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(value: object) -> str:
    """Return a short representation of a value for an error."""
    return _SHORT.repr(value)


def _place(where: str, path: str) -> str:
    return f"{where} ({path})" if where and path else where or path


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to format a number of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxtuple, _SHORT.maxlist = 3, 12, 8, 8
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 60, 40, 60
