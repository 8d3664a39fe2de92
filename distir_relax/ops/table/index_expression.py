"""Elements of a tensor as functions of their indices: ``i1 <= i0 + past`` is a causal mask.

``i0``, ``i1``, ... are the indices of an element along the dims of its tensor. An integer is an expression of sizes
over these and the symbols of the program; a truth value is a `Condition`, or a `bool` if all elements are alike.
Conditions are decided where the bounds of the indices, and of the symbols, do so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypeGuard

from distir_relax.layout import Symbol, evaluate_size, is_always, size_of, symbols_within
from distir_relax.layout.symbolic_size import Size, SymbolicSize

Element: TypeAlias = "Size | Condition | bool"
ElementOf: TypeAlias = (
    "Callable[[Sequence[Element], Sequence[Sequence[Size]], Mapping[str, Any], Sequence[Size]], Element | None]"
)
"""From the elements of an op's operands, at the indices of these, their shapes, the attributes, and the shape of the
result: an element of the result, or None if it is no such function. The operands of a pointwise op have the indices of
the result. An index along a dim of one element is 0."""
_INDEX = re.compile(r"i\d+")


@dataclass(frozen=True)
class Condition:
    """A comparison of two numbers, or several conditions: all (``and``) or some (``or``) of them hold."""

    kind: Literal["<=", "==", "!=", "and", "or"]
    parts: tuple[Any, ...]

    def __str__(self) -> str:
        if self.kind in ("and", "or"):
            return f" {self.kind} ".join(f"({part})" if _is_joint(part) else str(part) for part in self.parts)
        return f"{self.parts[0]} {self.kind} {self.parts[1]}"


def is_index(symbol: Symbol) -> bool:
    """Return whether a symbol has the name of an index."""
    return bool(_INDEX.fullmatch(symbol.name))


@cache
def index_of(dim: int) -> Size:
    """Return the index of an element along a dim."""
    return size_of(Symbol(f"i{dim}"))


def reindexed(element: Element, indices: Sequence[Size]) -> Element:
    """Return an element with other `indices`, one for each dim of its tensor."""
    if isinstance(element, Condition):
        if element.kind in ("and", "or"):
            return _joint(element.kind, (reindexed(part, indices) for part in element.parts))
        first, second = (reindexed_number(part, indices) for part in element.parts)
        return _decided(element.kind, first, second)
    return reindexed_number(element, indices)


def reindexed_number(element: Size, indices: Sequence[Size]) -> Size:
    """Return a number with other `indices`, one for each dim of its tensor."""
    if not isinstance(element, SymbolicSize):
        return element
    found: Size = evaluate_size(element, {f"i{dim}": value for dim, value in enumerate(indices)})
    return found


def broadcast_element(element: Element, shape: Sequence[Size], target: Sequence[Size]) -> Element:
    """Return an element of a tensor of a `shape` at the indices of one that it is broadcast to."""
    first = len(target) - len(shape)
    return reindexed(element, [index_of(first + dim) if n != 1 else 0 for dim, n in enumerate(shape)])


def is_number(element: Element) -> TypeGuard[Size]:
    """Return whether an element is a number: the others are truth values."""
    return not isinstance(element, (bool, Condition))


def compared(first: Size, relation: str, second: Size, shape: Sequence[Size]) -> Element:
    """Return a comparison of two numbers of tensors of a `shape`."""
    if relation in (">", ">="):
        first, second, relation = second, first, relation.replace(">", "<")
    if relation == "<":
        first, relation = first + 1, "<="
    return _decided(relation, first, second, shape)


def all_of(elements: Iterable[Element]) -> Element:
    """Return whether all of some truth values hold."""
    return _joint("and", elements)


def any_of(elements: Iterable[Element]) -> Element:
    """Return whether one of some truth values holds."""
    return _joint("or", elements)


def negated(element: Element) -> Element:
    """Return whether a truth value does not hold."""
    if not isinstance(element, Condition):
        return not element
    if element.kind in ("and", "or"):
        return _joint("or" if element.kind == "and" else "and", map(negated, element.parts))
    if element.kind == "<=":
        return _decided("<=", element.parts[1] + 1, element.parts[0])
    return Condition("!=" if element.kind == "==" else "==", element.parts)


def is_within(element: Size, low: Size, high: Size, shape: Sequence[Size]) -> bool:
    """Return whether the numbers of a tensor of a `shape` are proved to be at least `low` and below `high`."""
    return compared(low, "<=", element, shape) is True and compared(element, "<", high, shape) is True


def symbols_of_element(element: Element) -> frozenset[Symbol]:
    """Return the symbols of an element, its indices among them."""
    if isinstance(element, Condition):
        return frozenset().union(*map(symbols_of_element, element.parts))
    return symbols_within(element)


def _joint(kind: Literal["and", "or"], elements: Iterable[Element]) -> Element:
    """Return whether all, or some, of some truth values hold."""
    decisive, parts = kind == "or", list[Condition]()
    for element in elements:
        if not isinstance(element, Condition):
            if bool(element) is decisive:
                return decisive
            continue
        parts += element.parts if element.kind == kind else [element]
    different = sorted(dict.fromkeys(parts), key=str)
    if not different:
        return not decisive
    return different[0] if len(different) == 1 else Condition(kind, tuple(different))


def _decided(kind: Any, first: Size, second: Size, shape: Sequence[Size] = ()) -> Element:
    """Return a comparison of numbers of tensors of a `shape`: a `bool` if it is the same for all elements."""
    difference = second - first
    least, most = (_extreme(difference, shape, sign) for sign in (1, -1))
    if kind == "<=":
        if least is not None and is_always(0, "<=", least):
            return True
        if most is not None and is_always(most, "<", 0):
            return False
    elif least == most == 0:
        return bool(kind == "==")
    elif (least is not None and is_always(0, "<", least)) or (most is not None and is_always(most, "<", 0)):
        return bool(kind == "!=")
    # Equal comparisons look alike. A difference of quotients is no simpler than these.
    if "//" not in f"{first} {second}":
        second, first = _sides(difference)
    if kind != "<=":
        first, second = sorted((first, second), key=lambda number: (isinstance(number, int), str(number)))
    return Condition(kind, (first, second))


def _extreme(number: Size, shape: Sequence[Size], sign: int) -> Size | None:
    """Return the least (1) or largest (-1) number over all indices; None if it is not linear in them."""
    if not isinstance(number, SymbolicSize):
        return number
    values: dict[str, Size] = {}
    for symbol in filter(is_index, symbols_within(number)):
        linear = dict(number.terms).get((symbol,))
        uses = sum(symbol in symbols_within(SymbolicSize(((monomial, 1),))) for monomial, _ in number.terms)
        if linear is None or uses != 1:
            return None
        is_last = (linear > 0) == (sign < 0)
        dim = int(symbol.name[1:])
        if is_last and dim >= len(shape):
            return None
        values[symbol.name] = shape[dim] - 1 if is_last else 0
    found: Size = evaluate_size(number, values)
    return found


def _is_joint(part: Any) -> bool:
    return isinstance(part, Condition) and part.kind in ("and", "or")


def _sides(number: Size) -> tuple[Size, Size]:
    """Return the positive terms of a number, and the negated negative ones."""
    if not isinstance(number, SymbolicSize):
        return number, 0
    sides: list[Size] = [0, 0]
    for monomial, coefficient in number.terms:
        term = SymbolicSize(((monomial, 1),)) if monomial else 1
        sides[coefficient < 0] = sides[coefficient < 0] + abs(coefficient) * term
    return sides[0], sides[1]
