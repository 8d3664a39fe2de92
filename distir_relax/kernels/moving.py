"""Values that are left to the function that is called with them."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def moved(value: T, nothing: None) -> T:
    """`value`, which its caller lets go: ``f(moved(x, x := None))`` runs `f` with the only reference to `x`.

    So its memory can be used again as soon as `f` needs it no more. A plain argument is held until `f` returns.
    """
    return value
