"""Memory of large tensors in large pages, where the system allows it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PAGE = 1 << 21
_LEAST = 1 << 23
_HUGE_PAGE = 14


def large_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose elements have any values.

    New memory comes in pages of 4 KB, whose first use takes longer than to write to them. Here they have 2 MB.
    """
    import torch

    x = torch.empty(tuple(shape), dtype=dtype)
    if x.nbytes >= _LEAST and (advise := _advise()) is not None:
        start, end = -(-x.data_ptr() // _PAGE) * _PAGE, (x.data_ptr() + x.nbytes) // _PAGE * _PAGE
        # Without effect where the system refuses.
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _HUGE_PAGE)
    return x


@cache
def _advise() -> Any:
    """Return the function of the C library, if it has one."""
    return getattr(ctypes.CDLL(None), "madvise", None)
