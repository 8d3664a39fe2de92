"""Growing tensors: elements are appended along a dim, in place if the tensor has reserved memory, or in a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FIRST = 64
"""Least number of elements along the dim for which memory is reserved on growth."""


def append(past: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate along `dim`. The result takes over the memory reserved for `past` (`reserve`), if there is enough.

    Otherwise memory for twice as many elements is reserved, so a loop copies each element a constant number of times.
    `past` stays valid, but a second tensor appended to it is copied.
    """
    length = past.shape[dim]
    total = length + new.shape[dim]
    buffer: torch.Tensor | None = getattr(past, "reserved", None)
    if buffer is None or buffer.shape[dim] < total:
        buffer = past.new_empty([*past.shape[:dim], max(2 * total, _FIRST), *past.shape[dim + 1 :]])
        buffer.narrow(dim, 0, length).copy_(past)
    else:
        past.reserved = None  # type: ignore[attr-defined]
    buffer.narrow(dim, length, total - length).copy_(new)
    return reserve(buffer, total, dim)


def reserve(buffer: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """Return the first `length` elements of `buffer` along `dim`; `append` may write after them."""
    result = buffer.narrow(dim, 0, length)
    result.reserved = buffer  # type: ignore[attr-defined]
    return result


def extend(buffer: torch.Tensor, length: int, new: torch.Tensor, dim: int) -> torch.Tensor:
    """Write `new` after the first `length` elements of `buffer` along `dim`, and return those with the new ones."""
    count = new.shape[dim]
    buffer.narrow(dim, length, count).copy_(new)
    return buffer.narrow(dim, 0, length + count)
