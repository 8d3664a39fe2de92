"""Provenance of a bundle: its model, the source files of its weights, and the versions of the software that made it."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import stat
import sys
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from distir_relax.errors import BundleError
from distir_relax.support import Fields, shown_path

CHECKSUM_DIGITS = 64
"""Digits of a SHA-256 in hex."""
_MOST_CHARACTERS, _MOST_VERSIONS, _MOST_FILES = 2000, 64, 100_000
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class FileDigest:
    """The name of a file, without its folder, and its SHA-256 in hex."""

    name: str
    checksum: str


@dataclass(frozen=True)
class Provenance:
    """The origin of a bundle, without a date, so that equal inputs give equal bundles.

    `model` is the qualified name of the model's class, or the name of its file, whose SHA-256 is `model_checksum`; None
    for a distributed program. `checkpoints` are the files that weights came from, other than the manifest's
    `weight_files`. `versions` are those of the software that made the bundle, by name.

    Raises BundleError for a text that is not printable or too long, and for a checksum that is not one.
    """

    model: str | None = None
    model_checksum: str | None = None
    checkpoints: tuple[FileDigest, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for limit, entries in ((_MOST_VERSIONS, self.versions), (_MOST_FILES, self.checkpoints)):
            if len(entries) > limit:
                raise BundleError(f"expected at most {limit:,} entries, found {len(entries):,}", "provenance")
        names = [name for name in (self.model,) if name is not None]
        names += [*self.versions, *self.versions.values(), *(file.name for file in self.checkpoints)]
        for name in names:
            if not name or len(name) > _MOST_CHARACTERS or not name.isprintable():
                raise BundleError(f"expected a text of printable characters, found {name[:60]!a}", "provenance")
        for checksum in (self.model_checksum, *(file.checksum for file in self.checkpoints)):
            if checksum is not None and not is_checksum(checksum):
                raise BundleError(f"expected a SHA-256 in hex, found {checksum[:60]!a}", "provenance")

    @classmethod
    def from_json(cls, table: Fields) -> Provenance:
        """Parse the field of a manifest. Raises the table's error for fields that are missing or do not fit."""
        files = tuple(FileDigest(row.text("name"), row.text("checksum")) for row in table.rows("checkpoints"))
        model, checksum = table.text_or_none("model"), table.text_or_none("model_checksum")
        return cls(model, checksum, files, table.by_name("versions"))


def is_checksum(text: str) -> bool:
    """Whether a text is a SHA-256 in hex, in lower case."""
    return len(text) == CHECKSUM_DIGITS and set(text) <= _HEX


class SourceFile:
    """A file that a model or its weights were read from.

    It stays open until it is hashed, also if it is deleted meanwhile. Raises BundleError if it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(path))
        try:
            # The path may be a FIFO: O_NONBLOCK does not wait for a writer.
            self._file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
        except OSError as wrong:
            raise BundleError(f"cannot be read: {wrong.strerror}", shown_path(path)) from None
        weakref.finalize(self, self._file.close)
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise BundleError("expected a file", shown_path(path))
        self._opened = _identity(os.fstat(self._file.fileno()))
        self._digest: FileDigest | None = None

    def hash(self) -> FileDigest:
        """Return the file's name and checksum, for which the first call reads all of it.

        Raises BundleError if it was written to or replaced since it was opened.
        """
        if self._digest is None:
            checksum = hashlib.file_digest(self._file, "sha256").hexdigest()
            present = {_identity(os.fstat(self._file.fileno()))}
            with suppress(OSError):
                present.add(_identity(os.stat(self.path)))
            if present != {self._opened}:
                raise BundleError("the file has changed since the model was read", str(self.path), "compile again")
            self._file.close()
            self._digest = FileDigest(shown_path(self.path.name), checksum)
        return self._digest


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Origin:
    """The origin of an imported model: `model` and `checksum` as in `Provenance`, and `files` that weights came from.

    `packages` are those of the model's class or its file, by import name, whose versions are recorded if they have one.
    """

    model: str | None = None
    checksum: str | None = None
    files: tuple[SourceFile, ...] = ()
    packages: tuple[str, ...] = ()

    def provenance(self, packages: Collection[str]) -> Provenance:
        """Return the provenance of a bundle that more `packages` have made, without the files, which are hashed when
        the bundle is written."""
        for name in packages:
            # So that the versions do not depend on what else this process has done.
            importlib.import_module(name)
        return Provenance(self.model, self.checksum, versions=_versions({*packages, *self.packages}))


def _versions(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of this package, Python, and those of the packages that have one, in order of their names."""
    found = {"distir-relax": str(sys.modules["distir_relax"].__version__), "python": platform.python_version()}
    for name in sorted(packages):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str) and version and version.isprintable():
            found[name] = str(version)[:_MOST_CHARACTERS]
    return found
