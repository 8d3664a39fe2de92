"""Values that are left to the function that is called with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def moved(value: T, nothing: None) -> T:
    """`value`, which its caller lets go: ``f(moved(x, x := None))`` runs `f` with the only reference to `x`.

    So its memory can be used again as soon as `f` needs it no more. A plain argument is held until `f` returns.
    """
    return value


def emptied(values: list[T]) -> Iterator[T]:
    """The values of a list, in order, each of which the list lets go.

    ``a, b = emptied(given)`` takes what a caller has `moved` into a list: more than 30 arguments Python puts into a
    tuple, which holds them until the function returns.
    """
    values.reverse()
    while values:
        yield values.pop()
