"""Bounds checks of indices, before any access.

Where a dim is split, each device handles indices within its part and ignores others: an index out of range would be
ignored silently, and TVM's code would access memory outside of the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.errors import RunError
from distir_relax.kernels.recording import runs_whole

if TYPE_CHECKING:
    import torch


@runs_whole
def checked(ids: torch.Tensor, low: int, high: int, user: str, where: str = "") -> torch.Tensor:
    """Return `ids`, whose elements must be at least `low` and less than `high`.

    Raises `RunError` at location `where` for the op `user` if one is out of range.
    """
    import torch

    if ids.numel():
        smallest, largest = (int(n) for n in torch.aminmax(ids))
        if smallest < low or largest >= high:
            raise out_of_range(smallest if smallest < low else largest, low, high, user, where)
    return ids


def out_of_range(index: int, low: int, high: int, user: str, where: str) -> RunError:
    """Return the error for an index out of range."""
    valid = f"from {low} to {high - 1}" if high > low else "none, since the dim has no elements"
    return RunError(
        f"{user} is given the index {index}, which is out of range: valid are {valid}",
        where,
        "check the input that the index is computed from" if high > low else "",
    )
