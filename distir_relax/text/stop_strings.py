"""Stop strings: texts that end a generation, in pieces of any size."""

from __future__ import annotations

from collections.abc import Collection

from distir_relax.errors import RunError


class StopStrings:
    """Filter of a text that comes in pieces: it ends before the first occurrence of one of `stops`.

    Raises RunError for an empty stop string.
    """

    def __init__(self, stops: Collection[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RunError(f"expected stop texts of at least one character, found {', '.join(map(repr, stops))}")
        self._stops = tuple(stops)
        self._held = ""
        self.is_reached = False

    def feed(self, piece: str) -> str:
        """Return the text before a stop string; the start of what may become one is held for the next call."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_reached, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that is still held, after the last piece."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
