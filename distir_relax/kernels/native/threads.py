"""Parallel loops of kernels on the threads of torch.

Threads of another pool would wait for their next work for a while, and take the cores from torch's: a product with such
threads made torch's next parallel op wait for 5 ms.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""Functions of OpenMP's library, GCC's or one that is compatible."""


def use_threads(module: Any) -> None:
    """Let a library of a kernel use torch's threads, if those are OpenMP's; its loops are serial otherwise."""
    if addresses := openmp_functions():
        module["use_threads"](*addresses)


@cache
def openmp_functions() -> tuple[int, ...]:
    """Return the addresses of `_OPENMP` in the library that torch uses, none if it uses another kind of threads."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _OPENMP]
    except (OSError, AttributeError):
        return ()
    return tuple(address for address in found if address)
