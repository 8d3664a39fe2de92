"""Indices are looked at before anything is read or written by them.

Where a dim is split, a device takes what falls into its part and leaves the rest to others: an index that is nobody's
would be left out without a word, and TVM's code would follow it into memory that is not the tensor's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir_relax.errors import RunError

if TYPE_CHECKING:
    import torch


def checked(ids: torch.Tensor, low: int, high: int, user: str, where: str = "") -> torch.Tensor:
    """`ids` themselves, whose elements must be at least `low` and less than `high`.

    Raises `RunError` at the place `where` for one that is not, with the op `user` that takes them.
    """
    import torch

    if ids.numel():
        least, most = (int(n) for n in torch.aminmax(ids))
        if least < low or most >= high:
            raise out_of_range(least if least < low else most, low, high, user, where)
    return ids


def out_of_range(index: int, low: int, high: int, user: str, where: str) -> RunError:
    """The error for an index that `user` may not take."""
    valid = f"from {low} to {high - 1}" if high > low else "none, since the dim has no elements"
    return RunError(
        f"{user} is given the index {index}, which is out of range: valid are {valid}",
        where,
        "look at the input that the index is made from" if high > low else "",
    )
