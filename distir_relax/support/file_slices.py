"""Files of which another host needs some bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

COPIES = "DISTIR_COPIES"
"""The variable with the folder of copies that an agent has made."""


class Slice(NamedTuple):
    """Bytes of a file: `repeats` pieces of `length` bytes, the first at `start`, each `stride` after the one before."""

    start: int
    length: int
    stride: int = 0
    repeats: int = 1

    @property
    def bytes(self) -> int:
        """The number of bytes."""
        return self.length * self.repeats

    def pieces(self, most: int) -> Iterator[tuple[int, int]]:
        """Iterate over consecutive pieces of at most `most` bytes: their positions in the file, and their lengths."""
        for number in range(self.repeats):
            start = self.start + number * self.stride
            for offset in range(0, self.length, most):
                yield start + offset, min(most, self.length - offset)


@dataclass(frozen=True)
class HostFile:
    """A file of `size` bytes for a host; `path` is relative to the folder that it belongs to, and may begin with `..`.

    The host gets the `slices` of `source`, or all of `text`.
    """

    path: str
    size: int
    source: Path | None = None
    text: bytes = b""
    slices: Sequence[Slice] = ()

    @classmethod
    def whole(cls, path: str, source: Path) -> HostFile:
        """Return all of a file."""
        size = source.stat().st_size
        return cls(path, size, source, slices=[Slice(0, size)])
