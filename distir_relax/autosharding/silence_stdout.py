"""Silence the standard output of C libraries, such as HiGHS, while the command may print a document there."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence_stdout() -> Iterator[None]:
    """Discard C output to standard output; HiGHS prints a few lines whatever its options say."""
    library = ctypes.CDLL(None)
    if sys.stdout is not None:
        sys.stdout.flush()
    library.fflush(None)
    try:
        saved = os.dup(1)
    except OSError:
        # There is no standard output.
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    try:
        yield
    finally:
        # C buffers its output.
        library.fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
