"""Copies of weights files that hold only some slices: those that the ranks of a host read.

A copy has the file's size, with holes, and a file next to it whose name ends with `.slices`: the slices, their
checksum, and that of the whole file, whose sender has verified it. Such files are believed in folders of `COPIES`
alone, which agents set: next to any other file they would stand for weights that nobody has verified.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distir_relax.errors import BundleError
from distir_relax.support import Fields, parse_json, read_bytes
from distir_relax.support.file_slices import COPIES, Slice

SUFFIX = ".slices"
_MOST = 100_000_000


@dataclass(frozen=True)
class FileSlices:
    """The slices that a copy holds, in the order of their `checksum`, which is a SHA-256; `whole` is the file's."""

    slices: Sequence[Slice]
    checksum: str
    whole: str

    @classmethod
    def of(cls, path: Path) -> FileSlices | None:
        """Return the slices of a copy, None for a file that is none. Raises BundleError if they are damaged."""
        folder, own = os.environ.get(COPIES), Path(os.path.realpath(path) + SUFFIX)
        if not folder or not own.is_relative_to(os.path.realpath(folder)) or not own.is_file():
            return None
        where = str(own)
        fields = Fields.of(parse_json(read_bytes(own, BundleError, _MOST), BundleError, where), BundleError, where)
        numbers = fields.wholes("slices")
        slices = [Slice(*numbers[i : i + 4]) for i in range(0, len(numbers) - len(numbers) % 4, 4)]
        return cls(slices, fields.text("checksum"), fields.text("whole"))

    @classmethod
    def from_file(cls, file: int, slices: Sequence[Slice], whole: str) -> FileSlices:
        """Return the slices of an open file, whose checksum `whole` has been verified."""
        return cls(slices, _checksum(file, slices), whole)

    def text(self) -> str:
        """Return the text of the file next to a copy."""
        numbers = [number for one in self.slices for number in one]
        return json.dumps({"slices": numbers, "checksum": self.checksum, "whole": self.whole})

    def are_in(self, file: int) -> bool:
        """Whether an open file holds the slices."""
        return _checksum(file, self.slices) == self.checksum


def _checksum(file: int, slices: Sequence[Slice]) -> str:
    digest = hashlib.sha256()
    for one in slices:
        for position, length in one.pieces(1 << 22):
            digest.update(os.pread(file, length, position))
    return digest.hexdigest()
