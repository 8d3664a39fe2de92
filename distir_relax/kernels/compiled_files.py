"""Files of compiled code: ``$XDG_CACHE_HOME/distir-relax/kernels``, by default under ``~/.cache``.

The name of a file has the hash of all that its content depends on. A file is written whole or not at all, and is used
only if nobody but this user can have written it. Together they have at most `MOST_BYTES`: the least recently used are
removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkstemp

from distir_relax.kernels.processor import processor_field

MOST_BYTES = 1 << 29
_LOCK = "lock"
_POLL = 0.05


def compiled_folder() -> Path | None:
    """Return the folder, made if need be; None if there is none that this user alone can write to."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "distir-relax" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder.stat()) else None
    except (OSError, RuntimeError):
        return None


def compiled_key(*parts: object) -> str:
    """Return the hash of `parts`, which have a `repr` of their content, the versions of TVM, and the processor."""
    versions = [_version(package) for package in ("apache-tvm", "apache-tvm-ffi")]
    processor = f"{processor_field('model name')} {processor_field('flags')}"
    return hashlib.sha256(repr((parts, versions, processor)).encode()).hexdigest()[:24]


def _version(package: str) -> str:
    """Return the version of a package; empty without it: kernels need no TVM."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_usable(file: Path) -> bool:
    """Return whether there is such a file that this user alone can write to; it counts as used now."""
    try:
        status = file.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status):
            return False
        os.utime(file)
    except OSError:
        return False
    return True


def write_compiled(content: bytes, file: Path) -> None:
    """Write a file; other processes see the whole of it or nothing. An error leaves no file."""
    with suppress(OSError):
        descriptor, name = mkstemp(dir=file.parent)
        try:
            with open(descriptor, "wb") as written:
                written.write(content)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink()
            raise
        _remove_oldest(file.parent)


def remove_compiled(pattern: str) -> None:
    """Remove the files of the folder whose names match a pattern."""
    folder = compiled_folder()
    for file in folder.glob(pattern) if folder else ():
        file.unlink(missing_ok=True)


@contextmanager
def one_compiles(file: Path, timeout: float = 300.0) -> Iterator[None]:
    """Let one process at a time run the block for a file: the others wait, but at most `timeout` seconds.

    A process that ends, in whatever way, no longer holds the lock. Without locks, as on some network file systems,
    nobody waits.
    """
    try:
        lock = os.open(file.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        _wait_for(lock, int(hashlib.sha256(file.name.encode()).hexdigest()[:7], 16), time.monotonic() + timeout)
        yield
    finally:
        os.close(lock)


def _wait_for(lock: int, place: int, end: float) -> None:
    """Lock the byte at `place`: one file has the locks of all others."""
    with suppress(OSError):
        while time.monotonic() < end:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                return
            except BlockingIOError:
                time.sleep(_POLL)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove_oldest(folder: Path) -> None:
    found = [(file, file.stat()) for file in folder.iterdir() if file.is_file() and file.name != _LOCK]
    total = sum(status.st_size for _, status in found)
    for file, status in sorted(found, key=lambda item: item[1].st_mtime):
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= status.st_size
