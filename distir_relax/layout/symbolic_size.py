"""Symbolic sizes: integer expressions over named symbols with bounds, such as ``batch`` and ``(sequence + 1) // 2``.

An expression is a polynomial with integer coefficients. Its atoms are symbols, floor divisions, minima and maxima::

    size  = product {("+" | "-") product}
    product = unit {("*" | "//") unit}
    unit  = number | symbol | "(" size ")" | ("min" | "max") "(" size {"," size} ")"

Arithmetic normalizes: equal polynomials are equal objects, ``(4*n + 2) // 4`` is ``n``, nested divisions are joined,
the balanced parts of ``n`` add up to ``n``, and a result without symbols is an `int`. So code that computes with sizes
works for both.

Comparisons are decided for all values within the bounds, or raise `UndecidedSize`. They are exact for sums of floor
divisions of one symbol by constants: with ``n = L*q + r``, where L is a multiple of all divisors, every division is
linear in ``q`` for each remainder ``r``, and a linear function has its bounds at those of ``q``. Elsewhere interval
arithmetic decides, or nothing does. Within `guarding`, what nothing decides is assumed to hold as it does at example
values, and recorded as a `Guard` to be checked when a program runs.

To the type checker a `SymbolicSize` is an `int`, as torch's SymInt is: code that computes with sizes has one form.
"""

from __future__ import annotations

import ast
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from keyword import iskeyword
from typing import TYPE_CHECKING, Literal, TypeAlias

from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    Size: TypeAlias = int
    _Int = int
else:
    Size = "int | SymbolicSize"
    _Int = object
Relation: TypeAlias = Literal["<", "<=", "=="]

_MAX_CASES = 8192
"""Maximum number of combinations of remainders that a decision enumerates, times that of the floor divisions."""
_MAX_NORMAL_LENGTH = 4000
"""Maximum number of characters of the normal form of an expression that is parsed."""
_MAX_EXTREMA = 64
"""Maximum number of choices of arguments of minima and maxima that a decision enumerates."""
_MAX_LENGTH = 400
"""Maximum number of characters of an expression."""
_MAX_SAMPLES = 64
"""Maximum number of choices of values that are tried until one meets the guards of a program."""
_TYPICAL = 128
"""The typical value of a symbol, unless given or out of its bounds."""


class UndecidedSize(DistIRError):
    """A comparison of sizes that holds for some values of the symbols only, or cannot be decided."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A comparison that is assumed to hold, or not to hold, at every call. `location` is its place in the model."""

    first: Size
    relation: Relation
    second: Size
    holds: bool
    location: str = ""

    def __str__(self) -> str:
        return f"{self.first} {self.relation if self.holds else _NEGATED[self.relation]} {self.second}"

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The symbols that it depends on."""
        return symbols_of(self.first) | symbols_of(self.second)

    @property
    def ends(self) -> tuple[float, float]:
        """The bounds of the difference of both sizes."""
        if self.relation == "==":
            return (0, 0) if self.holds else (-math.inf, math.inf)
        last = -1 if self.relation == "<" else 0
        return (-math.inf, last) if self.holds else (last + 1, math.inf)

    def is_met(self, values: Mapping[str, int]) -> bool:
        """Return whether it holds for values of all symbols."""
        first, second = evaluate_size(self.first, values), evaluate_size(self.second, values)
        return is_always(first, self.relation, second) == self.holds


_NEGATED = {"<": ">=", "<=": ">", "==": "!="}


@dataclass(slots=True)
class Guards:
    """The guards found within `guarding`; `location` is the place in the model of what is being compared.

    Once `is_complete`, only comparisons that were found are decided by them.
    """

    found: dict[tuple[Size, Relation, Size], Guard] = field(default_factory=dict)
    location: str = ""
    is_complete: bool = False
    """Whether there are no others: of a program that was imported."""

    def decide(self, first: Size, relation: Relation, second: Size) -> bool | None:
        """Return whether a comparison holds for the typical values, and record that as a guard.

        If the guards are complete, return what follows from one of them, or None.
        """
        key = (first, relation, second)
        if key not in self.found:
            if self.is_complete:
                return self._follows(first, relation, second)
            holds = is_always(typical_value(first), relation, typical_value(second))
            self.found[key] = Guard(*key, bool(holds), self.location)
        return self.found[key].holds

    def _follows(self, first: Size, relation: Relation, second: Size) -> bool | None:
        """Return whether a comparison holds if one of the guards does, which bounds the same difference; None if open.

        From ``new + past <= 64`` it follows that ``64 < new + past`` does not hold.
        """
        low, high = -math.inf, math.inf
        for guard in self.found.values():
            ends = guard.ends
            for sign in (1, -1):
                offset = first - second - sign * (guard.first - guard.second)
                if isinstance(offset, int):
                    a, b = sorted(sign * end + offset for end in ends)
                    low, high = max(low, a), min(high, b)
        if high < 0 or low > 0:
            return high < 0 and relation != "=="
        if relation == "<" and low >= 0:
            return False
        return True if relation == "<=" and high <= 0 else None


_GUARDS: ContextVar[Guards | None] = ContextVar("guards", default=None)


@contextmanager
def guarding(guards: Guards) -> Iterator[Guards]:
    """Record what cannot be decided in `guards`, instead of raising `UndecidedSize`."""
    token = _GUARDS.set(guards)
    try:
        yield guards
    finally:
        _GUARDS.reset(token)


def assuming(guards: Iterable[Guard]) -> AbstractContextManager[Guards]:
    """Return a context in which comparisons are decided by the guards of an imported program."""
    found = {(guard.first, guard.relation, guard.second): guard for guard in guards}
    return guarding(Guards(found, is_complete=True))


def locate_guards(location: str) -> None:
    """Set the place in the model of the next guards."""
    if guards := _GUARDS.get():
        guards.location = location


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named size between `low` and `high`, inclusive; `high` is None if there is no bound.

    Where costs decide, and where a comparison is only assumed, `typical` stands for all values.
    """

    name: str
    low: int = 0
    high: int | None = None
    typical: int = -1

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or iskeyword(self.name) or self.name in ("min", "max"):
            raise DistIRError(f"expected an identifier for the name of a size, found {self.name!r}")
        if self.low < 0 or (self.high is not None and self.high < self.low):
            raise DistIRError(f"expected bounds 0 <= low <= high of {self.name}, found {self.low} to {self.high}")
        if self.typical == -1:
            object.__setattr__(self, "typical", self.nearest(_TYPICAL))
        if not self.contains(self.typical):
            raise DistIRError(f"expected a typical size of {self.name} within {self.range}, found {self.typical}")

    @property
    def range(self) -> str:
        """The bounds in words: ``at least 1 and at most 64``."""
        return f"at least {self.low}" + ("" if self.high is None else f" and at most {self.high}")

    def contains(self, value: int) -> bool:
        """Whether a value is within the bounds."""
        return value >= self.low and (self.high is None or value <= self.high)

    def nearest(self, value: int) -> int:
        """Return the value within the bounds that is nearest to another."""
        return max(self.low, value if self.high is None else min(value, self.high))

    def check(self, value: int) -> None:
        """Raise `DistIRError` for a value out of bounds."""
        if not self.contains(value):
            raise DistIRError(f"expected {self.name} of {self.range}, found {value}")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Call:
    """A floor division, a minimum or a maximum of normalized sizes."""

    kind: Literal["//", "min", "max"]
    arguments: tuple[Size, ...]

    def __str__(self) -> str:
        if self.kind == "//":
            return " // ".join(_print_unit(argument) for argument in self.arguments)
        return f"{self.kind}({', '.join(map(str, self.arguments))})"


_Atom: TypeAlias = "Symbol | _Call"
_Monomial: TypeAlias = tuple[_Atom, ...]
"""A product of atoms, sorted by their texts; empty for a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicSize(_Int):
    """An expression that depends on a symbol, as the terms of a polynomial: coefficients by product of atoms.

    ``==`` compares normal forms, so that sizes can be keys; `are_equal` decides whether two sizes are equal for all
    values. The order relations raise `UndecidedSize` if neither they nor their negation hold for all values.
    """

    terms: tuple[tuple[_Monomial, int], ...]
    # Cached: types with symbolic sizes are keys in hot loops.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.terms))

    def __add__(self, other: Size) -> Size:
        return _combine(self, other, 1)

    def __radd__(self, other: int) -> Size:
        return self + other

    def __sub__(self, other: Size) -> Size:
        return _combine(self, other, -1)

    def __rsub__(self, other: int) -> Size:
        return _combine(other, self, -1)

    def __neg__(self) -> Size:
        return _combine(0, self, -1)

    def __mul__(self, other: Size) -> Size:
        return _multiply_out(self, other)

    def __rmul__(self, other: int) -> Size:
        return self * other

    def __floordiv__(self, other: Size) -> Size:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return floor_divide(other, self)

    def __mod__(self, other: Size) -> Size:
        return self - other * floor_divide(self, other)

    def __rmod__(self, other: int) -> Size:
        return other - self * floor_divide(other, self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SymbolicSize) and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: Size) -> bool:
        return _decide(self, "<", other)

    def __le__(self, other: Size) -> bool:
        return not _decide(other, "<", self)

    def __gt__(self, other: Size) -> bool:
        return _decide(other, "<", self)

    def __ge__(self, other: Size) -> bool:
        return not _decide(self, "<", other)

    def __bool__(self) -> bool:
        return not are_equal(self, 0)

    def __str__(self) -> str:
        text = ""
        first = next((term for term in self.terms if term[0] and term[1] > 0), self.terms[0])
        for monomial, coefficient in (first, *(term for term in self.terms if term is not first)):
            sign = ("" if coefficient > 0 else "-") if not text else " + " if coefficient > 0 else " - "
            is_unit = len(monomial) + (abs(coefficient) != 1) > 1 or sign == "-"
            factors = [f"({atom})" if is_unit and _is_division(atom) else str(atom) for atom in monomial]
            number = [str(abs(coefficient))] if abs(coefficient) != 1 or not factors else []
            text += sign + "*".join([*number, *factors])
        return text

    __repr__ = __str__


def size_of(symbol: Symbol) -> Size:
    """Return a symbol as a size; a number if its bounds are equal."""
    return symbol.low if symbol.low == symbol.high else SymbolicSize((((symbol,), 1),))


def multiple_of_symbol(size: Size) -> tuple[Symbol, int] | None:
    """Return the symbol and the factor of a size such as ``32*columns``; None for other sizes."""
    if not isinstance(size, SymbolicSize) or len(size.terms) != 1:
        return None
    ((monomial, factor),) = size.terms
    (atom, *others) = monomial
    return (atom, factor) if isinstance(atom, Symbol) and not others and factor > 0 else None


def floor_divide(size: Size, divisor: Size) -> Size:
    """Return ``size // divisor``. Raises `UndecidedSize` unless the divisor is positive for all values."""
    if isinstance(size, int) and isinstance(divisor, int) and divisor > 0:
        return size // divisor
    if not isinstance(divisor, int) or divisor <= 0:
        low, _ = bounds(divisor)
        if low is None or low <= 0:
            raise UndecidedSize(f"expected a divisor of at least 1, found {divisor}, {_print_bounds(divisor)}")
        return _divide_by_symbolic(size, divisor)
    quotient, rest = _split_multiple(size, divisor)
    low, high = bounds(rest)
    if low is not None and high is not None and low // divisor == high // divisor:
        return quotient + low // divisor
    if (nested := _nested_division(rest)) is not None:
        numerator, inner, constant = nested
        return quotient + floor_divide(numerator + inner * constant, inner * divisor)
    # floor((g*x + c) / (g*d)) == floor((x + floor(c / g)) / d)
    common = math.gcd(divisor, *(coefficient for monomial, coefficient in _terms(rest) if monomial))
    if common > 1:
        return quotient + floor_divide(_scale_down(rest, common), divisor // common)
    return quotient + _atom(_Call("//", (rest, divisor)))


def total(sizes: Iterable[Size]) -> Size:
    """Return the sum of sizes, normalized once."""
    items = tuple(sizes)
    return _total(items) if any(isinstance(n, SymbolicSize) for n in items) else sum(items)


def minimum(*sizes: Size) -> Size:
    """Return the least of sizes."""
    return _extremum("min", sizes)


def maximum(*sizes: Size) -> Size:
    """Return the largest of sizes."""
    return _extremum("max", sizes)


def balanced_part(size: Size, count: int, index: int) -> Size:
    """Return the size of part `index` of `count` balanced parts; the first parts are the larger ones."""
    return floor_divide(size + (count - 1 - index), count)


def are_equal(first: Size, second: Size) -> bool:
    """Return whether two sizes are equal. Raises `UndecidedSize` if they are for some values of the symbols only."""
    return _decide(first, "==", second)


def is_always(first: Size, relation: Relation, second: Size) -> bool | None:
    """Return whether a relation holds for all values of the symbols, False if for none, None if that is undecided."""
    difference = second - first
    if relation == "==":
        if _is_at_least(difference, 1) or _is_at_least(-difference, 1):
            return False
        return True if _is_at_least(difference, 0) and _is_at_least(-difference, 0) else None
    least = 1 if relation == "<" else 0
    if _is_at_least(difference, least):
        return True
    return False if _is_at_least(-difference, 1 - least) else None


def symbols_of(size: Size) -> frozenset[Symbol]:
    """Return the symbols of a size."""
    atoms = frozenset(atom for monomial, _ in _terms(size) for atom in monomial)
    inner = (symbols_of(a) for atom in atoms if isinstance(atom, _Call) for a in atom.arguments)
    return frozenset(atom for atom in atoms if isinstance(atom, Symbol)).union(*inner)


def symbols_within(item: object) -> frozenset[Symbol]:
    """Return the symbols of a size, or of those within nested tuples."""
    if isinstance(item, tuple):
        return frozenset().union(*map(symbols_within, item))
    return symbols_of(item) if isinstance(item, SymbolicSize) else frozenset()


def evaluate_size(size: Size, values: Mapping[str, Size]) -> Size:
    """Return a size with `values` of symbols by name; symbols without a value remain.

    Raises `DistIRError` for a number outside of a symbol's bounds.
    """
    return size if isinstance(size, int) else _substitute(size, lambda symbol: _value(symbol, values))


def bounds(size: Size) -> tuple[int | None, int | None]:
    """Return numbers that a size is never below and never above, by interval arithmetic; None where there is none."""
    if isinstance(size, int):
        return size, size
    low: int | None = 0
    high: int | None = 0
    for monomial, coefficient in size.terms:
        term: tuple[int | None, int | None] = (coefficient, coefficient)
        for atom in monomial:
            term = _multiply(term, _atom_bounds(atom))
        low, high = _plus(low, term[0]), _plus(high, term[1])
    return low, high


def is_symbolic(item: object) -> bool:
    """Return whether a size, or one within nested tuples, depends on a symbol."""
    return any(map(is_symbolic, item)) if isinstance(item, tuple) else isinstance(item, SymbolicSize)


def generic_value(size: Size) -> int:
    """Return the value of a size where each symbol is a large prime, whatever its bounds.

    There products are divisible if their expressions are, and larger expressions are larger: analyses that factor and
    order sizes use it. Parts such as ``n // 3`` and ``(n + 1) // 3`` may be equal.
    """
    if not isinstance(size, SymbolicSize):
        return size
    return _generic_value(size)


def typical_value(size: Size) -> int:
    """Return the value of a size for the typical values of its symbols."""
    return _typical_value(size) if isinstance(size, SymbolicSize) else size


def fixed_value(size: Size) -> int:
    """Return the typical value of a size, after the comparison with it is decided: while a model is imported, a guard.

    Raises `UndecidedSize` elsewhere.
    """
    number = typical_value(size)
    _decide(size, "==", number)
    return number


def print_sizes(sizes: Sequence[Size], separator: str) -> str:
    """Print sizes with a separator, and with spaces around it if one is symbolic: ``8,4``, ``batch, 4``."""
    if not is_symbolic(tuple(sizes)):
        return separator.join(map(str, sizes))
    return (f"{separator} " if separator == "," else f" {separator} ").join(map(str, sizes))


def sample_values(symbols: Iterable[Symbol]) -> list[dict[str, int]]:
    """Return values of symbols by name to try: small ones, the typical, and other ones.

    Within `assuming` they meet the guards, as typical values do. Of no symbols, this is one empty choice.
    """
    ordered = sorted(set(symbols), key=str)
    if not ordered:
        return [{}]
    assumed = _GUARDS.get()
    guards = list(assumed.found.values()) if assumed is not None and assumed.is_complete else []
    tried = sorted({*ordered, *(symbol for guard in guards for symbol in guard.symbols)}, key=str)
    typical = {s.name: s.typical for s in tried}
    found = []
    for first, step in ((0, 0), (3, 1)):
        choices = (
            {s.name: n if s.contains(n := s.low + first + i * step + more) else s.typical for i, s in enumerate(tried)}
            for more in range(_MAX_SAMPLES)
        )
        found.append(next((c for c in choices if all(guard.is_met(c) for guard in guards)), typical))
    return [{s.name: values[s.name] for s in ordered} for values in (found[0], typical, found[1])]


def parse_size(text: str, symbols: Mapping[str, Symbol]) -> Size:
    """Parse a size over `symbols` by name. Raises `DistIRError` for other texts."""
    if len(text) > _MAX_LENGTH:
        raise DistIRError(f"expected a size of at most {_MAX_LENGTH} characters, found {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise DistIRError(f"expected a size such as 2*batch + 1, found {text!r}") from None
    try:
        return _parse(tree.body, text, symbols)
    except RecursionError:
        raise DistIRError(f"expected a size with fewer parentheses, found {text!r}") from None


@lru_cache(maxsize=4096)
def _typical_value(size: SymbolicSize) -> int:
    return _substitute(size, lambda symbol: symbol.typical)


@lru_cache(maxsize=4096)
def _generic_value(size: SymbolicSize) -> int:
    return _substitute(size, lambda symbol: _prime(symbol.name))


@lru_cache(maxsize=256)
def _prime(name: str) -> int:
    """Return a prime above a billion, larger than any dim, for a symbol."""
    candidate = 1_000_000_001 + 2 * (zlib.crc32(name.encode()) % 500_000_000)
    while any(candidate % divisor == 0 for divisor in range(3, math.isqrt(candidate) + 1, 2)):
        candidate += 2
    return candidate


def _terms(size: Size) -> tuple[tuple[_Monomial, int], ...]:
    if isinstance(size, SymbolicSize):
        return size.terms
    return (((), size),) if size else ()


def _normalize(terms: Mapping[_Monomial, int]) -> Size:
    """Return the size of terms in normal form."""
    return _join_parts(_polynomial(terms))


def _polynomial(terms: Mapping[_Monomial, int]) -> Size:
    """Return the size of terms: those of symbols first, the constant last."""
    kept = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    if not kept.keys() - {()}:
        return kept.get((), 0)
    ordered = sorted(kept.items(), key=lambda item: (-len(item[0]), [str(atom) for atom in item[0]]))
    return SymbolicSize(tuple(ordered))


# A program has the same few sizes again and again, and sorting their terms takes long.
@lru_cache(maxsize=1 << 14)
def _combine(first: Size, second: Size, sign: int) -> Size:
    """Return ``first + sign * second``."""
    terms = dict(_terms(first))
    for monomial, coefficient in _terms(second):
        terms[monomial] = terms.get(monomial, 0) + sign * coefficient
    return _normalize(terms)


@lru_cache(maxsize=1 << 14)
def _multiply_out(first: Size, second: Size) -> Size:
    terms: dict[_Monomial, int] = {}
    for (left, a), (right, b) in product(_terms(first), _terms(second)):
        monomial = tuple(sorted((*left, *right), key=str))
        terms[monomial] = terms.get(monomial, 0) + a * b
    return _normalize(terms)


@lru_cache(maxsize=1 << 12)
def _total(sizes: tuple[Size, ...]) -> Size:
    terms: dict[_Monomial, int] = {}
    for size in sizes:
        for monomial, coefficient in _terms(size):
            terms[monomial] = terms.get(monomial, 0) + coefficient
    return _normalize(terms)


def _join_parts(size: Size) -> Size:
    """Apply Hermite's identity: the sum of ``(n + d*j) // (d*k)`` over j below k is ``n // d``.

    Of these k terms, the most common coefficient becomes 0, the least of several: ``n - (n + 1) // 2`` is ``n // 2``.
    """
    for (others, numerator, divisor), constants in _families(size).items():
        # More than half of the terms of an identity are there, or it has two.
        for count in range(2, 2 * len(constants) + 1):
            if divisor % count == 0:
                joined = _join_family(size, others, numerator, divisor, divisor // count, constants)
                if joined is not None:
                    return _join_parts(joined)
    return size


def _families(size: Size) -> dict[tuple[_Monomial, Size, int], list[int]]:
    """Return the constants of terms ``others * ((numerator + constant) // divisor)``, if they may be joined.

    The keys are the other factors, the numerator and the divisor.
    """
    families: dict[tuple[_Monomial, Size, int], list[int]] = {}
    negative = set()
    for monomial, coefficient in _terms(size):
        for index, atom in enumerate(monomial):
            if isinstance(atom, _Call) and atom.kind == "//" and isinstance(divisor := atom.arguments[1], int):
                numerator = atom.arguments[0]
                constant = dict(_terms(numerator)).get((), 0)
                key = (monomial[:index] + monomial[index + 1 :], numerator - constant, divisor)
                families.setdefault(key, []).append(constant)
                if coefficient < 0 and divisor % 2 == 0:
                    negative.add(key)
    return {key: constants for key, constants in families.items() if len(constants) > 1 or key in negative}


def _join_family(
    size: Size, others: _Monomial, numerator: Size, divisor: int, inner: int, constants: Iterable[int]
) -> Size | None:
    """Apply the identity to the terms of one numerator and divisor, for d = `inner`; None if nothing changes."""
    terms = dict(_terms(size))
    for first, members in sorted(Counter(constant % inner for constant in constants).items()):
        if 2 * members < divisor // inner:
            continue
        numerators = [numerator + constant for constant in range(first, divisor, inner)]
        parts = [_product(others, n, divisor) for n in numerators]
        counts = [terms.get(part, 0) for part in parts]
        number = Counter(counts)
        shift = min(count for count in number if number[count] == max(number.values()))
        if shift == 0 or sum(count != 0 for count in counts) < sum(count != shift for count in counts):
            continue
        factor: Size = SymbolicSize(((others, 1),)) if others else 1
        added = shift * floor_divide(numerator + first, inner)
        for part, n in zip(parts, numerators, strict=True):
            # A part that is not among the terms may be a number: (min(n, 2) + 1) // 2 is 1.
            if isinstance(value := floor_divide(n, divisor), SymbolicSize):
                terms[part] = terms.get(part, 0) - shift
            else:
                added -= shift * value
        for monomial, coefficient in _terms(factor * added):
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _polynomial(terms)
    return None


def _product(others: _Monomial, numerator: Size, divisor: int) -> _Monomial:
    return tuple(sorted((*others, _Call("//", (numerator, divisor))), key=str))


def _atom(atom: _Atom) -> Size:
    return SymbolicSize((((atom,), 1),))


def _split_multiple(size: Size, divisor: int) -> tuple[Size, Size]:
    """Return (q, r) with ``size == divisor * q + r``: r has the coefficients modulo the divisor."""
    quotient, rest = {}, {}
    for monomial, coefficient in _terms(size):
        quotient[monomial], rest[monomial] = divmod(coefficient, divisor)
    return _normalize(quotient), _normalize(rest)


def _nested_division(size: Size) -> tuple[Size, int, int] | None:
    """Return (a, b, c) of a size ``a // b + c`` with constants b and c."""
    symbolic = [(monomial, coefficient) for monomial, coefficient in _terms(size) if monomial]
    if len(symbolic) != 1 or symbolic[0][1] != 1 or len(symbolic[0][0]) != 1:
        return None
    call = symbolic[0][0][0]
    if isinstance(call, _Call) and call.kind == "//" and isinstance(divisor := call.arguments[1], int):
        return call.arguments[0], divisor, dict(_terms(size)).get((), 0)
    return None


def _scale_down(size: Size, divisor: int) -> Size:
    return _normalize({monomial: coefficient // divisor for monomial, coefficient in _terms(size)})


def _divide_by_symbolic(size: Size, divisor: Size) -> Size:
    """Return the quotient by a symbolic size: terms that it divides are divided, and a rest below it is 0 or -1."""
    if size == divisor:
        return 1
    quotient: dict[_Monomial, int] = {}
    rest: dict[_Monomial, int] = {}
    ((factors, number),) = _terms(divisor) if len(_terms(divisor)) == 1 else ((None, 1),)
    for monomial, coefficient in _terms(size):
        others = None if factors is None or coefficient % number else _without(monomial, factors)
        if others is None:
            rest[monomial] = coefficient
        else:
            quotient[others] = coefficient // number
    whole, remainder = _normalize(quotient), _normalize(rest)
    for result in (0, -1):
        low, high = divisor * result, divisor * (result + 1)
        if is_always(low, "<=", remainder) and is_always(remainder, "<", high):
            return whole + result
    return whole + _atom(_Call("//", (remainder, divisor)))


def _without(monomial: _Monomial, factors: _Monomial) -> _Monomial | None:
    """Return a product without some of its factors; None if it lacks one."""
    rest = list(monomial)
    for atom in factors:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _extremum(kind: Literal["min", "max"], sizes: Iterable[Size]) -> Size:
    """Return a minimum or maximum without the arguments that others dominate."""
    flat: dict[Size, None] = {}
    for size in sizes:
        atom = size.terms[0][0][0] if isinstance(size, SymbolicSize) and _is_single(size) else None
        nested = atom.arguments if isinstance(atom, _Call) and atom.kind == kind else (size,)
        flat.update(dict.fromkeys(nested))
    remaining = list(flat)
    for candidate in list(flat):
        others = [other for other in remaining if other != candidate]
        pairs = ((other, candidate) if kind == "min" else (candidate, other) for other in others)
        if any(is_always(a, "<=", b) for a, b in pairs):
            remaining = others
    if len(remaining) == 1:
        return remaining[0]
    return _atom(_Call(kind, tuple(sorted(remaining, key=str))))


def _is_single(size: SymbolicSize) -> bool:
    """Return whether a size is an atom alone."""
    return len(size.terms) == 1 and len(size.terms[0][0]) == 1 and size.terms[0][1] == 1


def _substitute(size: Size, value: Callable[[Symbol], Size]) -> Size:
    result: Size = 0
    for monomial, coefficient in _terms(size):
        term: Size = coefficient
        for atom in monomial:
            term = term * (value(atom) if isinstance(atom, Symbol) else _apply(atom, value))
        result = result + term
    return result


def _apply(call: _Call, value: Callable[[Symbol], Size]) -> Size:
    arguments = [_substitute(argument, value) for argument in call.arguments]
    return floor_divide(*arguments) if call.kind == "//" else _extremum(call.kind, arguments)


def _value(symbol: Symbol, values: Mapping[str, Size]) -> Size:
    value = values.get(symbol.name)
    if value is None:
        return size_of(symbol)
    if isinstance(value, int):
        symbol.check(value)
    return value


@lru_cache(maxsize=1 << 14)
def _is_at_least(size: Size, number: int) -> bool:
    """Return whether a size is proved to be at least a number, by the arguments of its minima and maxima.

    A sum with a minimum is at least a number if that holds with each argument in its place; one that subtracts a
    minimum, if it holds with some argument.
    """
    if isinstance(size, int):
        return size >= number
    low, _ = _tight_bounds(size)
    if low is not None and low >= number:
        return True
    extrema = [(m[0], c) for m, c in size.terms if len(m) == 1 and isinstance(m[0], _Call) and m[0].kind != "//"]
    if not extrema or math.prod(len(call.arguments) for call, _ in extrema) > _MAX_EXTREMA:
        return False
    # First those of which all arguments are needed: each of the cases may have another argument that suffices.
    call, factor = max(extrema, key=_needs_all)
    rest = size - factor * _atom(call)
    cases = (_is_at_least(rest + factor * argument, number) for argument in call.arguments)
    return all(cases) if _needs_all((call, factor)) else any(cases)


def _needs_all(term: tuple[_Call, int]) -> bool:
    """Return whether a lower bound of a term, a minimum or maximum with a factor, has to hold for all its arguments."""
    call, factor = term
    return (call.kind == "min") == (factor > 0)


def _decide(first: Size, relation: Relation, second: Size) -> bool:
    decided = is_always(first, relation, second)
    if decided is None and (guards := _GUARDS.get()):
        decided = guards.decide(first, relation, second)
    if decided is None:
        names = ", ".join(sorted({symbol.name for symbol in symbols_of(first) | symbols_of(second)}))
        raise UndecidedSize(f"{first} {relation} {second} depends on the values of {names}")
    return decided


@lru_cache(maxsize=1 << 14)
def _tight_bounds(size: SymbolicSize) -> tuple[int | None, int | None]:
    """Return bounds as `bounds` does, but exact ones for linear floor divisions by constants, case by case."""
    modulus = _moduli(size)
    cases = math.prod(modulus.values())
    if cases <= 1 or cases * len(list(_calls(size))) > _MAX_CASES:
        return bounds(size)
    lows: list[int | None] = []
    highs: list[int | None] = []
    for remainders in product(*map(range, modulus.values())):
        case = dict(zip(modulus, zip(modulus.values(), remainders, strict=True), strict=True))
        if (limits := _case_bounds(size, case)) is not None:
            lows.append(limits[0])
            highs.append(limits[1])
    return _least(lows), _largest(highs)


def _case_bounds(size: Size, parts: Mapping[Symbol, tuple[int, int]]) -> tuple[int | None, int | None] | None:
    """Return bounds of a size where each symbol is ``modulus * q + remainder``; None if no value is."""
    values: dict[Symbol, Size] = {}
    for symbol, (modulus, remainder) in parts.items():
        low = -((remainder - symbol.low) // modulus)
        high = None if symbol.high is None else (symbol.high - remainder) // modulus
        if high is not None and high < low:
            return None
        quotient = size_of(Symbol(symbol.name, max(0, low), high))
        values[symbol] = modulus * quotient + remainder
    return bounds(_substitute(size, lambda symbol: values.get(symbol, size_of(symbol))))


def _moduli(size: Size) -> dict[Symbol, int]:
    """Return for each symbol a multiple of all constants that divide an expression of it."""
    moduli: dict[Symbol, int] = {}
    for call in _calls(size):
        if call.kind == "//" and isinstance(call.arguments[1], int):
            for symbol in symbols_of(call.arguments[0]):
                nested = _moduli(call.arguments[0]).get(symbol, 1)
                moduli[symbol] = math.lcm(moduli.get(symbol, 1), call.arguments[1] * nested)
    return moduli


def _calls(size: Size) -> Iterator[_Call]:
    for monomial, _ in _terms(size):
        for atom in monomial:
            if isinstance(atom, _Call):
                yield atom
                for argument in atom.arguments:
                    yield from _calls(argument)


def _atom_bounds(atom: _Atom) -> tuple[int | None, int | None]:
    if isinstance(atom, Symbol):
        return atom.low, atom.high
    ranges = [bounds(argument) for argument in atom.arguments]
    if atom.kind == "//":
        (low, high), (least, most) = ranges
        assert least is not None, "divisors are positive"
        divisors = [least, most]
        return _least(_quotient(low, d) for d in divisors), _largest(_quotient(high, d) for d in divisors)
    lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
    if atom.kind == "min":
        return _least(lows), min((high for high in highs if high is not None), default=None)
    return max((low for low in lows if low is not None), default=None), _largest(highs)


def _quotient(number: int | None, divisor: int | None) -> int | None:
    """Return a bound of a quotient; a divisor of None is arbitrarily large."""
    if number is None:
        return None
    return number // divisor if divisor is not None else (-1 if number < 0 else 0)


def _multiply(first: tuple[int | None, int | None], second: tuple[int | None, int | None]) -> tuple[
    int | None, int | None
]:  # fmt: skip
    """Return the product of two intervals."""
    corners = []
    for a, a_sign in zip(first, (-1, 1), strict=True):
        for b, b_sign in zip(second, (-1, 1), strict=True):
            corners.append(_corner(a, a_sign, b, b_sign))
    low, high = min(corners), max(corners)
    return (None if low == -math.inf else int(low)), (None if high == math.inf else int(high))


def _corner(a: int | None, a_sign: int, b: int | None, b_sign: int) -> float | int:
    """Return a product of ends of intervals; None is infinite, with the sign of its end."""
    if a == 0 or b == 0:
        return 0
    if a is not None and b is not None:
        return a * b
    sign = (a_sign if a is None else (1 if a > 0 else -1)) * (b_sign if b is None else (1 if b > 0 else -1))
    return sign * math.inf


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _least(numbers: Iterable[int | None]) -> int | None:
    found = list(numbers)
    return None if any(n is None for n in found) else min(n for n in found if n is not None)


def _largest(numbers: Iterable[int | None]) -> int | None:
    found = list(numbers)
    return None if any(n is None for n in found) else max(n for n in found if n is not None)


def _print_bounds(size: Size) -> str:
    low, high = bounds(size)
    return f"which is {'at least ' + str(low) if low is not None else 'unbounded below'}" + (
        f" and at most {high}" if high is not None else ""
    )


def _is_division(atom: _Atom) -> bool:
    return isinstance(atom, _Call) and atom.kind == "//"


def _print_unit(size: Size) -> str:
    text = str(size)
    return text if text.isidentifier() or text.isdecimal() else f"({text})"


def _parse(node: ast.expr, text: str, symbols: Mapping[str, Symbol]) -> Size:
    def inner(child: ast.expr) -> Size:
        size = _parse(child, text, symbols)
        if len(str(size)) > _MAX_NORMAL_LENGTH:
            raise DistIRError(
                f"expected a size of at most {_MAX_NORMAL_LENGTH} characters without parentheses, found {text!r}"
            )
        return size

    match node:
        case ast.Constant(value=int() as value) if type(value) is int:
            return value
        case ast.Name(id=name):
            if name not in symbols:
                raise DistIRError(f"there is no size {name!r} in {text!r}", hint=f"sizes are {', '.join(symbols)}")
            return size_of(symbols[name])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return inner(left) + inner(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return inner(left) - inner(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return inner(left) * inner(right)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return floor_divide(inner(left), inner(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -inner(operand)
        case ast.Call(func=ast.Name(id="min"), args=[_, *_] as arguments, keywords=[]):
            return minimum(*map(inner, arguments))
        case ast.Call(func=ast.Name(id="max"), args=[_, *_] as arguments, keywords=[]):
            return maximum(*map(inner, arguments))
    raise DistIRError(f"expected a size such as 2*batch + 1, found {text!r}")
