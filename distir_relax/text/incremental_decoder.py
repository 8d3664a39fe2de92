"""Incremental decoding: the text of a sequence of tokens, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens of the context: some decoders remove the space before the first token.
_CONTEXT = 5
_INCOMPLETE = "\ufffd"


class IncrementalDecoder:
    """Decoder of one sequence. A character whose bytes are in several tokens is returned whole, with the last of them.

    `decode` gives the text of tokens, with U+FFFD for incomplete bytes. The texts returned add up to that of all
    tokens after `context`, the last tokens of the prompt, in the place after it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-_CONTEXT:])
        # The context may begin within a character, which some decoders extend to the bytes after it.
        while self._tokens and decode(self._tokens).startswith(_INCOMPLETE):
            del self._tokens[0]
        # Tokens of the context, and the characters of the text of `_tokens` that have been returned.
        self._context = len(self._tokens)
        self._returned = len(decode(self._tokens))

    def feed(self, token: int) -> str:
        """Return the text that is complete with another token; it may be empty."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        complete = text.rstrip(_INCOMPLETE)
        piece = complete[self._returned :]
        self._returned += len(piece)
        if piece and len(complete) == len(text):
            self._tokens = self._tokens[self._context :]
            self._context = len(self._tokens)
            self._returned = len(self._decode(self._tokens))
        return piece

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD for characters that the sequence leaves incomplete."""
        return self._decode(self._tokens)[self._returned :]
