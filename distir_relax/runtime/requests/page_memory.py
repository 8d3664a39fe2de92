"""Memory that is reserved as address space, used page by page, and shared with copies until they change it.

A reservation is a mapping of a file without a name, so the system gives a page when it is first written to. A copy maps
the pages of the original privately: both read the same memory, and a page that the copy writes to becomes its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Sized
from functools import cache
from typing import Any

PAGE = mmap.PAGESIZE
MOST_SHARED = 16_000
"""Most ranges of pages that a process shares: each splits a mapping in two, of which Linux allows 65,530."""
_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def is_available() -> bool:
    """Whether this system has such memory: Linux."""
    return hasattr(os, "memfd_create")


class PageMemory:
    """Memory of `size` bytes, zero at first, that is released with the last use of its `buffer`."""

    def __init__(self, size: int) -> None:
        self._size = max(PAGE, -(-size // PAGE) * PAGE)
        self._file = os.memfd_create("distir-states", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, self._size)
            self._start = _map(None, self._size, mmap.MAP_SHARED, self._file, 0)
        except OSError:
            os.close(self._file)
            raise
        # Pages that are another's: their first page here, their number, and where they are there.
        self._shared: list[tuple[int, int, PageMemory, int]] = []
        # Copies keep it open, also after the memory itself is gone.
        weakref.finalize(self, os.close, self._file)
        weakref.finalize(self, _ranges.forget, self._shared)

    def buffer(self) -> Any:
        """Return the bytes, for `torch.frombuffer`. Called once; the memory is unmapped with the result."""
        found = (ctypes.c_char * self._size).from_address(self._start)
        weakref.finalize(found, _release, self._start, self._size)
        return found

    def share(self, start: int, other: PageMemory, other_start: int, count: int) -> None:
        """Let the `count` pages from `start` be those of another memory, until they are written to here.

        The other must not change them any more. Raises OSError if there is no room for the mapping, in the system or
        below `MOST_SHARED`.
        """
        if _ranges.number >= MOST_SHARED:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        for first, pages, owner, place in other._pieces(other_start, count):
            here = start + first - other_start
            _map(self._start + here * PAGE, pages * PAGE, mmap.MAP_PRIVATE | _FIXED, owner._file, place * PAGE)
            self._shared.append((here, pages, owner, place))
            _ranges.add(1)

    def _pieces(self, start: int, count: int) -> list[tuple[int, int, PageMemory, int]]:
        """Return the owners of a range of pages: pages of its own are this memory's."""
        found = []
        position = start
        for first, pages, owner, place in sorted(self._shared, key=lambda item: item[0]):
            begin, end = max(first, position), min(first + pages, start + count)
            if begin < end:
                if position < begin:
                    found.append((position, begin - position, self, position))
                found.append((begin, end - begin, owner, place + begin - first))
                position = end
        if position < start + count:
            found.append((position, start + count - position, self, position))
        return found


class _Ranges:
    """The number of shared ranges of this process."""

    def __init__(self) -> None:
        self.number = 0
        # Reentrant: memory may be collected, and forgotten, while another range is added.
        self._lock = threading.RLock()

    def add(self, count: int) -> None:
        with self._lock:
            self.number += count

    def forget(self, shared: Sized) -> None:
        self.add(-len(shared))


_ranges = _Ranges()


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def _map(address: int | None, size: int, flags: int, file: int, offset: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    start: int = _library().mmap(address, size, protection, flags, file, offset)
    if start == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return start


def _release(start: int, size: int) -> None:
    _library().munmap(start, size)
