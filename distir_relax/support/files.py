"""Safe access to files named by users or bundles: regular files, of bounded size, in strict UTF-8.

FIFOs, which may wait forever, and devices, which may never end, are not opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from distir_relax.errors import DistIRError

MOST_TEXT = 1 << 30
"""Maximum bytes of a text that this package reads."""


def check_regular(path: str | Path, error: type[DistIRError], missing: str = "there is no such file") -> int:
    """Return the size in bytes of the regular file at `path`, following links; it is not opened.

    Raises `error` (saying `missing`) if there is none, if something else is there, and for an impossible name.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise error(missing, shown_path(path)) from None
    except OSError as wrong:
        raise error(f"cannot be read: {wrong.strerror}", shown_path(path)) from None
    except ValueError as wrong:  # a NUL in the name, or a lone surrogate
        raise error(f"not a file's name: {wrong}", shown_path(path)) from None
    if not stat.S_ISREG(status.st_mode):
        raise error(f"expected a file, found {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}", str(path))
    return status.st_size


def read_bytes(
    path: str | Path, error: type[DistIRError], most: int = MOST_TEXT, missing: str = "there is no such file"
) -> bytes:
    """Return the content of a regular file. Raises `error` as `check_regular` does, and above `most` bytes."""
    size = check_regular(path, error, missing)
    if size > most:
        raise error(f"expected at most {most:,} bytes, found {size:,}", str(path))
    try:
        # The path may be a FIFO by now: O_NONBLOCK does not wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(size)
    except OSError as wrong:
        raise error(f"cannot be read: {wrong.strerror}", str(path)) from None


def read_text(path: str | Path, error: type[DistIRError], most: int = MOST_TEXT) -> str:
    """Return the text of a regular file. Raises `error` as `read_bytes` does, and with the line if it is not UTF-8."""
    content = read_bytes(path, error, most)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise error(f"not UTF-8 text: {wrong.reason}", f"{path}:{line_of(content, wrong.start)}") from None


def line_of(content: bytes, offset: int) -> int:
    """Return the number of the line, from 1, that contains a byte."""
    return content.count(b"\n", 0, offset) + 1


def check_name(name: str, error: type[DistIRError], where: str = "") -> None:
    """Raise `error` unless `name` is the path of a file below a folder, as in bundles: ``programs/main_0.py``.

    Absolute paths, ``..``, ``.``, empty parts, backslashes and names that no file system accepts are refused.
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
    """Return the regular file `name` of a folder.

    Raises `error` as `check_name` and `check_regular` do, and if links lead out of the folder.
    """
    check_name(name, error, shown_path(folder))
    file = folder / name
    check_regular(file, error, missing)
    try:
        inside = file.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError) as wrong:  # RuntimeError: circular links
        raise error(f"cannot be read: {wrong}", str(file)) from None
    if not inside:
        raise error("a link leads out of the folder", str(file))
    return file


def shown_path(path: str | Path) -> str:
    """Return a path for printing: on one line, in UTF-8."""
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
    """Write a file atomically. Raises `DistIRError` when it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DistIRError(f"cannot be written: {error.strerror}", str(path)) from None
