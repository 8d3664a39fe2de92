"""What HiGHS prints for itself, kept from standard output, which may be a document of the command's."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unheard() -> Iterator[None]:
    """Drop what C code writes to standard output, as HiGHS does with a few lines whatever its options say."""
    library = ctypes.CDLL(None)
    if sys.stdout is not None:
        sys.stdout.flush()
    library.fflush(None)
    try:
        kept = os.dup(1)
    except OSError:
        # There is none.
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    try:
        yield
    finally:
        # C keeps what it has written for later.
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
