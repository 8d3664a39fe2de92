"""Drafts of the next tokens by prompt lookup: those that followed the last time that the same tokens came before.

A step computes the drafts together with the last token, and keeps those that equal the tokens the model itself gives
(speculative decoding, Leviathan et al., ICML 2023, with drafts from the text alone). Text that repeats its prompt, as
summaries, edits and code do, is generated in fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence

_LENGTHS = (3, 2)
"""Numbers of tokens that are looked up, the longest first."""


class PromptLookup:
    """Drafts for one sequence of tokens, which grows."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # By the last tokens of a place: the position after it, and after the place before it.
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the sequence."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for length in _LENGTHS:
                if end >= length:
                    key = tuple(self._tokens[end - length :])
                    self._places[key] = end, self._places.get(key, (-1, -1))[0]

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens that may follow; none if the last ones have not occurred before."""
        end = len(self._tokens)
        for length in _LENGTHS:
            if end >= length and (place := self._places[tuple(self._tokens[end - length :])][1]) >= 0:
                return self._tokens[place : place + count]
        return []
