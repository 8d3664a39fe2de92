"""Exit of the process without the interpreter's teardown, which takes a second once torch and TVM are loaded."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_without_teardown() -> Iterator[None]:
    """End this process with the block's exit code, after its threads and all exit handlers registered in the block.

    The block is the program: it returns, or raises SystemExit. After any other exception, and if the standard streams
    cannot be flushed, the teardown runs and reports it.
    """
    code: list[int] = []
    # Handlers run in reverse order: this one is the last.
    atexit.register(_exit, code)
    try:
        yield
        code.append(0)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code.append(ended.code or 0)
        raise


def _exit(code: list[int]) -> None:
    if not code:
        return
    # mpi4py would do so at the end of the teardown.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code[0])
