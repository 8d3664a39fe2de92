"""Requests that begin alike: which one has computed the longest beginning of another.

Beginnings are found by blocks of tokens, each with those before it as one key, and then compared token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 16
"""Tokens of a block: beginnings that are shorter are not shared."""


@dataclass(slots=True)
class _Entry:
    """The tokens that a request has computed, and the keys of its blocks."""

    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PrefixIndex:
    """The computed tokens of requests, by number."""

    _entries: dict[int, _Entry] = field(default_factory=dict)
    _by_key: dict[int, int] = field(default_factory=dict)

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Add tokens that a request has computed."""
        entry = self._entries.setdefault(number, _Entry())
        entry.tokens += tokens
        while len(entry.keys) < len(entry.tokens) // BLOCK:
            start = len(entry.keys) * BLOCK
            before = entry.keys[-1] if entry.keys else 0
            entry.keys.append(hash((before, tuple(entry.tokens[start : start + BLOCK]))))
            self._by_key[entry.keys[-1]] = number

    def remove(self, number: int) -> None:
        """Forget a request."""
        entry = self._entries.pop(number, None)
        for key in entry.keys if entry else ():
            if self._by_key.get(key) == number:
                del self._by_key[key]

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return a request that begins with the first of these tokens, and with how many; (-1, 0) if none does."""
        key, found = 0, -1
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, tuple(tokens[start : start + BLOCK])))
            if key not in self._by_key:
                break
            found = self._by_key[key]
        if found < 0:
            return -1, 0
        shared = 0
        # Different blocks may have one key.
        for mine, other in zip(tokens, self._entries[found].tokens, strict=False):
            if mine != other:
                break
            shared += 1
        return (found, shared) if shared >= BLOCK else (-1, 0)
