"""Move semantics for arguments: the callee gets the only reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def moved(value: T, nothing: None) -> T:
    """Return `value`; ``f(moved(x, x := None))`` calls `f` with the only reference to `x`.

    So its memory can be reused after its last use in `f`. A plain argument is kept alive until `f` returns.
    """
    return value


def emptied(values: list[T]) -> Iterator[T]:
    """Yield the values of a list in order, removing each from the list.

    ``a, b = emptied(given)`` unpacks arguments that a caller has `moved` into a list: Python would put more than 30
    arguments into a tuple, which keeps them alive until the function returns.
    """
    values.reverse()
    while values:
        yield values.pop()
