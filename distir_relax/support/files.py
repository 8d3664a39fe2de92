"""Files that a user names, or that a bundle names: regular ones, of bounded size, in strict UTF-8.

A FIFO without a writer would wait for ever, and a device never ends: neither is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from distir_relax.errors import DistIRError

MOST_TEXT = 1 << 30
"""No text that this package reads has more bytes."""


def check_regular(path: str | Path, error: type[DistIRError], missing: str = "there is no such file") -> int:
    """The size in bytes of the regular file at `path`, links followed; it is not opened.

    Raises `error` where there is none (saying `missing`), where something else is there, and for a name no file has.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise error(missing, shown_path(path)) from None
    except OSError as wrong:
        raise error(f"cannot be read: {wrong.strerror}", shown_path(path)) from None
    except ValueError as wrong:  # a NUL in the name, or a lone surrogate
        raise error(f"not a file's name: {wrong}", shown_path(path)) from None
    if not stat.S_ISREG(found.st_mode):
        raise error(f"expected a file, found {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}", str(path))
    return found.st_size


def read_bytes(
    path: str | Path, error: type[DistIRError], most: int = MOST_TEXT, missing: str = "there is no such file"
) -> bytes:
    """All of a regular file. Raises `error` as `check_regular` does, and for one of more than `most` bytes."""
    size = check_regular(path, error, missing)
    if size > most:
        raise error(f"expected at most {most:,} bytes, found {size:,}", str(path))
    try:
        # What was a file a moment ago may be a FIFO now: opening that without a writer does not wait.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(most)
    except OSError as wrong:
        raise error(f"cannot be read: {wrong.strerror}", str(path)) from None


def read_text(path: str | Path, error: type[DistIRError], most: int = MOST_TEXT) -> str:
    """The text of a regular file. Raises `error` as `read_bytes` does, and where it is not UTF-8, with the place."""
    content = read_bytes(path, error, most)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise error(f"not UTF-8 text: {wrong.reason}", f"{path}:{line_of(content, wrong.start)}") from None


def line_of(content: bytes, offset: int) -> int:
    """The number of the line, from 1, in which a byte stands."""
    return content.count(b"\n", 0, offset) + 1


def check_name(name: str, error: type[DistIRError], where: str = "") -> None:
    """Raise `error` unless `name` is the path of a file below a folder, as bundles write them: ``programs/main_0.py``.

    Absolute paths, ``..``, ``.``, empty parts, backslashes and what no file system takes are refused.
    """
    parts = name.split("/")
    plain = name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)
    if not plain or PurePosixPath(name).is_absolute() or max(map(len, parts)) > 255:
        raise error(
            f"expected the path of a file inside the folder, found {name!r}",
            where,
            "such a path is relative, with names of letters, digits, '_', '-' and '.' between slashes",
        )


def file_within(folder: Path, name: str, error: type[DistIRError], missing: str = "there is no such file") -> Path:
    """The regular file `name` of a folder.

    Raises `error` as `check_name` and `check_regular` do, and where links lead out of the folder.
    """
    check_name(name, error, shown_path(folder))
    file = folder / name
    check_regular(file, error, missing)
    try:
        inside = file.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError) as wrong:  # RuntimeError: links in a circle
        raise error(f"cannot be read: {wrong}", str(file)) from None
    if not inside:
        raise error("a link leads out of the folder", str(file))
    return file


def shown_path(path: str | Path) -> str:
    """A path as it may be printed: on one line, in UTF-8."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises `DistIRError` when it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DistIRError(f"cannot be written: {error.strerror}", str(path)) from None
