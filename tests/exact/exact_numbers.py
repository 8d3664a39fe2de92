"""Arithmetic for checks of ops: numbers that tensors refer to by index, in a prime field.

The field's numbers are pairs of residues, of the primes `P` and `Q` with `Q` a divisor of ``P - 1``, as in Mirage (Wu
et al., OSDI 2025): the exponential of a number is ``OMEGA`` to the power of its residue of `Q`, so that ``exp(a + b)``
is ``exp(a) * exp(b)``. Other functions are hashes of the residue of `P`. Two results are equal if their residues of `P`
are; formulas that differ have equal residues with a probability of their degree over `P`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Generic, TypeVar

Q = 2**61 - 1
P = 52 * Q + 1
OMEGA = pow(2, 52, P)
"""An element of order `Q`."""

LARGEST = 1e30
"""Constants from here on are infinities: the largest numbers of float32 and float64, scores that masks exclude."""

E = TypeVar("E", bound=Hashable)


class Numbers(Generic[E]):
    """Numbers by index, each once; number 0 is zero. Subclasses compute with them.

    The methods take indices and return indices. `is_ordered` says whether any two numbers can be compared.
    """

    is_ordered = False

    def __init__(self) -> None:
        self.values: list[E] = []
        self._indices: dict[Hashable, int] = {}
        self._known: dict[tuple[object, ...], int] = {}
        self._constants: dict[tuple[float, bool], int] = {}
        self.constant(0)

    def index(self, value: E) -> int:
        """Return the index of a number."""
        key = self.key(value)
        found = self._indices.get(key)
        if found is None:
            found = self._indices[key] = len(self.values)
            self.values.append(value)
        return found

    def key(self, value: E) -> Hashable:
        """Return what tells numbers apart."""
        return value

    def constant(self, value: float, is_single: bool = False) -> int:
        """Return the index of a constant: of a float the fraction that it stands for (`simplest`).

        The largest float stands for an infinity: programs write it where one must not give NaN.
        """
        key = (value, is_single)
        if key not in self._constants:
            is_number = abs(value) < LARGEST
            self._constants[key] = self.index(
                self.of_fraction(simplest(float(value), is_single)) if is_number else self.infinity(value)
            )
        return self._constants[key]

    def apply(self, name: str, *operands: int) -> int:
        """Return the index of the result of a function: a method of that name, or one without properties."""
        key = (name, *operands)
        found = self._known.get(key)
        if found is None:
            compute = getattr(self, f"_{name}", None)
            values = [self.values[i] for i in operands]
            result = compute(*values) if compute else self.function(name, *values)
            found = self._known[key] = self.index(result)
        return found

    def sum(self, terms: Sequence[int]) -> int:
        """Return the index of a sum."""
        total = 0
        for term in terms:
            if term:
                total = self.apply("add", total, term) if total else term
        return total

    def of_fraction(self, value: Fraction) -> E:
        """Return a rational number."""
        raise NotImplementedError

    def infinity(self, value: float) -> E:
        """Return the infinity with the sign of a number, or NaN."""
        raise NotImplementedError

    def function(self, name: str, *operands: E) -> E:
        """Return the result of a function without properties."""
        raise NotImplementedError


@lru_cache(maxsize=4096)
def simplest(value: float, is_single: bool) -> Fraction:
    """Return the fraction that a float stands for: 1/10 for 0.1, also if it is a difference of others.

    It is one of a denominator up to 1000 within 1e-12 of the float, or else the one of the smallest
    denominator within four units in its last place. `is_single` says that it was rounded to float32.
    """
    exact = Fraction(value)
    small = exact.limit_denominator(1000)
    if abs(exact - small) * (1 << (18 if is_single else 40)) <= abs(exact):
        return small
    _, exponent = math.frexp(value)
    reach = 4 * Fraction(2) ** (exponent - (24 if is_single else 53))
    return (1 if value > 0 else -1) * _simplest_between(abs(exact) - reach, abs(exact) + reach)


def _simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """Return the fraction of the smallest denominator strictly between two positive ones."""
    whole = low.numerator // low.denominator
    if whole + 1 < high:
        return Fraction(whole + 1)
    if low == whole:
        return whole + Fraction(1, math.floor(1 / (high - whole)) + 1)
    return whole + 1 / _simplest_between(1 / (high - whole), 1 / (low - whole))


Pair = tuple[int, int]
NAN: Pair = (-1, 0)


class Field(Numbers[Pair]):
    """Numbers of the prime fields. `seed` draws the functions."""

    is_ordered = True

    def __init__(self, seed: int = 0) -> None:
        self._seed = str(seed).encode()
        super().__init__()

    def of_fraction(self, value: Fraction) -> Pair:
        return tuple(value.numerator * pow(value.denominator, -1, m) % m for m in (P, Q))  # type: ignore[return-value]

    def infinity(self, value: float) -> Pair:
        return NAN if math.isnan(value) else (-1, 1 if value > 0 else -1)

    def function(self, name: str, *operands: Pair) -> Pair:
        # Equal numbers may have other residues of Q: the hash is without them.
        text = f"{name} {' '.join(str(a if a >= 0 else (a, b)) for a, b in operands)}".encode()
        digest = int.from_bytes(hashlib.blake2b(text, key=self._seed, digest_size=64).digest(), "big")
        return digest % P, (digest >> 256) % Q

    def order(self, index: int) -> float | int:
        """Return the place of a number in the order of numbers."""
        return _place(self.values[index])

    def is_same(self, one: int, other: int) -> bool:
        """Return whether two numbers are equal."""
        a, b = self.values[one], self.values[other]
        return a[0] == b[0] and (a[0] >= 0 or a[1] == b[1])

    def random(self, text: str) -> int:
        """Return a number drawn by a text."""
        return self.index(self.function(f"draw {text}"))

    def _add(self, x: Pair, y: Pair) -> Pair:
        if x[0] < 0 or y[0] < 0:
            infinite = {v for v in (x, y) if v[0] < 0}
            return infinite.pop() if len(infinite) == 1 else NAN
        return (x[0] + y[0]) % P, (x[1] + y[1]) % Q

    def _neg(self, x: Pair) -> Pair:
        return (-1, -x[1]) if x[0] < 0 else (-x[0] % P, -x[1] % Q)

    def _mul(self, x: Pair, y: Pair) -> Pair:
        if x[0] < 0 or y[0] < 0:
            return NAN
        return x[0] * y[0] % P, x[1] * y[1] % Q

    def _inv(self, x: Pair) -> Pair:
        if x[0] <= 0:
            return (0, 0) if x[0] < 0 and x[1] else NAN
        # The residue of Q is 0 once in 2**61 times, and where functions of equal numbers were not distinguished.
        return pow(x[0], -1, P), pow(x[1], -1, Q) if x[1] else 0

    def _exp(self, x: Pair) -> Pair:
        if x[0] < 0:
            return {1: x, -1: (0, 0), 0: NAN}[x[1]]
        power = pow(OMEGA, x[1], P)
        return (1, 1) if not x[1] else (power, self.function("exponential", (power, 0))[1])

    def _sqrt(self, x: Pair) -> Pair:
        return (0, 0) if not x[0] else self.function("sqrt", x)

    def _log(self, x: Pair) -> Pair:
        return (0, 0) if x[0] == 1 else self.function("log", x)

    def _maximum(self, x: Pair, y: Pair) -> Pair:
        return max(x, y, key=_place)

    def _minimum(self, x: Pair, y: Pair) -> Pair:
        return min(x, y, key=_place)


def _place(x: Pair) -> float | int:
    a, b = x
    if a < 0:
        return b * math.inf
    return a if a <= P // 2 else a - P
