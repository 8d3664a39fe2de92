"""Real numbers as terms of z3, for tensors of exact numbers, and proofs that such tensors are equal.

Functions are unknown functions of z3, whose operands are sums of monomials, so that equal ones are the same term. Known
of them is: ``x / y`` is ``x`` times the reciprocal of `y`; products of exponentials are exponentials of sums; and a
factor ``exp(t)`` of all terms of a sum is taken out of its reciprocal and its logarithm, so that a softmax does not
depend on the number that is subtracted from all its operands.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

import z3

from tests.exact.exact_numbers import Numbers
from tests.exact.exact_tensors import Unsupported

Term = Any
"""A term of z3 of sort Real."""

LESS_THAN_ALL = z3.Real("-inf")
"""An additive mask. It may be added to numbers and compared with them, and its exponential is zero."""


class Terms(Numbers[Term]):
    """Terms of z3. `variables` are the unknown numbers."""

    def __init__(self) -> None:
        self.variables: list[Term] = []
        super().__init__()

    def key(self, value: Term) -> Hashable:
        # Equal terms are one object of z3.
        return value.get_id()  # type: ignore[no-any-return]

    def variable(self, name: str) -> int:
        """Return the index of an unknown number."""
        self.variables.append(z3.Real(name))
        return self.index(self.variables[-1])

    def of_fraction(self, value: Fraction) -> Term:
        return z3.Q(value.numerator, value.denominator)

    def infinity(self, value: float) -> Term:
        if not value < 0:
            raise Unsupported(f"{value} among symbolic numbers")
        return LESS_THAN_ALL

    def function(self, name: str, *operands: Term) -> Term:
        if any(x is LESS_THAN_ALL or x.eq(LESS_THAN_ALL) for x in operands):
            raise Unsupported(f"{name} of an infinity")
        return z3.Function(name, *[z3.RealSort()] * (len(operands) + 1))(*map(normal, operands))

    def _add(self, x: Term, y: Term) -> Term:
        if x.eq(LESS_THAN_ALL) or y.eq(LESS_THAN_ALL):
            return LESS_THAN_ALL
        return _folded(x + y, x, y)

    def _neg(self, x: Term) -> Term:
        return self._mul(z3.RealVal(-1), x)

    def _mul(self, x: Term, y: Term) -> Term:
        for a, b in ((x, y), (y, x)):
            if z3.is_rational_value(a) and a.as_fraction() in (0, 1):
                return a if a.as_fraction() == 0 else b
        if x.eq(LESS_THAN_ALL) or y.eq(LESS_THAN_ALL):
            raise Unsupported("an infinity times a number")
        return _folded(x * y, x, y)

    def _inv(self, x: Term) -> Term:
        x = normal(x)
        if z3.is_rational_value(x):
            if x.as_fraction() == 0:
                raise Unsupported("a division by zero")
            return z3.Q(x.denominator_as_long(), x.numerator_as_long())
        shift, rest = _without_shift(x)
        return self._mul(_exponential(normal(-shift)), self.function("reciprocal", rest))

    def _exp(self, x: Term) -> Term:
        return z3.RealVal(0) if x.eq(LESS_THAN_ALL) else _exponential(normal(x))

    def _log(self, x: Term) -> Term:
        shift, rest = _without_shift(normal(x))
        return self._add(shift, self.function("log", rest))

    def _maximum(self, x: Term, y: Term) -> Term:
        if x.eq(LESS_THAN_ALL) or y.eq(LESS_THAN_ALL):
            return y if x.eq(LESS_THAN_ALL) else x
        x, y = normal(x), normal(y)
        return x if x.eq(y) else z3.If(x >= y, x, y)

    def _minimum(self, x: Term, y: Term) -> Term:
        x, y = normal(x), normal(y)
        return x if x.eq(y) else z3.If(x <= y, x, y)

    def _lt(self, x: Term, y: Term) -> Term:
        return _number(normal(x) < normal(y))

    def _le(self, x: Term, y: Term) -> Term:
        return _number(normal(x) <= normal(y))

    def _gt(self, x: Term, y: Term) -> Term:
        return _number(normal(x) > normal(y))

    def _ge(self, x: Term, y: Term) -> Term:
        return _number(normal(x) >= normal(y))

    def _eq(self, x: Term, y: Term) -> Term:
        return _number(normal(x) == normal(y))

    def _ne(self, x: Term, y: Term) -> Term:
        return _number(normal(x) != normal(y))

    def _inverse(self, x: Term) -> Term:
        return self._add(z3.RealVal(1), self._neg(x))

    def _select(self, condition: Term, x: Term, y: Term) -> Term:
        return self._add(self._mul(condition, x), self._mul(self._inverse(condition), y))


def _number(condition: Any) -> Term:
    """Return 1 where a condition holds, and 0 elsewhere."""
    return z3.If(condition, z3.RealVal(1), z3.RealVal(0))


def _folded(result: Term, *operands: Term) -> Term:
    return z3.simplify(result) if all(map(z3.is_rational_value, operands)) else result


EXP, LOG, RECIPROCAL = (z3.Function(name, z3.RealSort(), z3.RealSort()) for name in ("exp", "log", "reciprocal"))
MINUS_ONE = z3.RealVal(-1)


def normal(x: Term) -> Term:
    """Return a term as a sum of monomials with at most one exponential each."""
    x = _summed(x)
    terms = _terms(x)
    joined = [_with_one_exponential(term) for term in terms]
    return x if all(a is b for a, b in zip(joined, terms, strict=True)) else normal(z3.Sum(joined))


def _summed(x: Term) -> Term:
    # By default z3 leaves products that would have more than ten times as many terms.
    return z3.simplify(x, som=True, sort_sums=True, som_blowup=1 << 20)


def _terms(x: Term) -> list[Term]:
    return x.children() if z3.is_add(x) else [x]  # type: ignore[no-any-return]


def _factors(term: Term) -> list[Term]:
    """Return the factors of a monomial, powers as repeated ones."""
    if z3.is_mul(term):
        return [factor for part in term.children() for factor in _factors(part)]
    if term.decl().kind() == z3.Z3_OP_POWER:
        return _factors(term.arg(0)) * term.arg(1).as_long()
    return [term]


def _split(term: Term) -> tuple[list[Term], list[Term]]:
    """Return the factors of a monomial that are no exponentials, and the operands of those that are."""
    factors = _factors(term)
    return [f for f in factors if not f.decl().eq(EXP)], [f.arg(0) for f in factors if f.decl().eq(EXP)]


def _with_one_exponential(term: Term) -> Term:
    rest, exponents = _split(term)
    return term if len(exponents) < 2 else z3.Product([*rest, _exponential(normal(z3.Sum(exponents)))])


def _exponential(x: Term) -> Term:
    """Return the exponential of a sum of monomials: of ``-log(y)`` it is the reciprocal of `y`."""
    factors, rest = [], []
    for term in _terms(x):
        if z3.is_mul(term) and term.num_args() == 2 and term.arg(0).eq(MINUS_ONE) and term.arg(1).decl().eq(LOG):
            factors.append(RECIPROCAL(term.arg(1).arg(0)))
        elif term.decl().eq(LOG):
            factors.append(term.arg(0))
        elif not (z3.is_rational_value(term) and term.as_fraction() == 0):
            rest.append(term)
    return z3.Product([*factors, *([EXP(_summed(z3.Sum(rest)))] if rest else [z3.RealVal(1)])])


def _without_shift(x: Term) -> tuple[Term, Term]:
    """Return `t` and `y`, such that a sum of monomials is ``exp(t) y``, the same `y` whatever it is multiplied by."""
    parts = [_split(term) for term in _terms(x)]
    if not all(exponents for _, exponents in parts):
        return z3.RealVal(0), x
    choices = []
    for _, (exponent,) in parts:
        rest = normal(z3.Sum([z3.Product([*f, _exponential(normal(e - exponent))]) for f, (e,) in parts]))
        choices.append((rest.sexpr(), exponent, rest))
    _, shift, rest = min(choices, key=lambda choice: choice[0])
    return shift, rest


def differ(numbers: Terms, pairs: Sequence[tuple[int, int]], timeout: float = 20.0) -> bool:
    """Return whether two of a pair differ for some numbers and functions; z3 proves it if not.

    `timeout` is in seconds. Divisors are not zero. Raises TimeoutError if z3 finds neither.
    """
    differences = {}
    for one, other in pairs:
        if one != other:
            difference = normal(numbers.values[one] - numbers.values[other])
            if not (z3.is_rational_value(difference) and difference.as_fraction() == 0):
                differences[difference.get_id()] = difference
    # A mistake shows at most points, where z3 needs no search.
    point = Point(numbers.variables)
    if any(point.value(difference) != 0 for difference in differences.values()):
        return True
    for difference in differences.values():
        solver = z3.Solver()
        solver.set("timeout", int(1000 * timeout))
        solver.add(difference != 0)
        answer = solver.check()
        if answer == z3.unknown:
            raise TimeoutError(f"z3 does not know ({solver.reason_unknown()}): {str(difference)[:300]}")
        if answer == z3.sat:
            return True
    return False


class Point:
    """Random numbers for variables, and for the results of functions."""

    def __init__(self, variables: Sequence[Term]) -> None:
        self._draw = random.Random(0)
        self._known: dict[Any, Fraction] = {}
        self._values = {x.get_id(): self._random() for x in variables}

    def value(self, x: Term) -> Fraction:
        """Return the value of a term here."""
        if x.get_id() not in self._values:
            self._values[x.get_id()] = self._computed(x)
        return self._values[x.get_id()]

    def _random(self) -> Fraction:
        return Fraction(self._draw.randint(-999, 999), 100)

    def _computed(self, x: Term) -> Fraction:
        if z3.is_rational_value(x):
            return Fraction(x.numerator_as_long(), x.denominator_as_long())
        kind = x.decl().kind()
        if kind == z3.Z3_OP_ITE:
            return self.value(x.arg(1 if self._holds(x.arg(0)) else 2))
        values = [self.value(y) for y in x.children()]
        if kind in ARITHMETIC:
            return reduce(ARITHMETIC[kind], values)
        if kind == z3.Z3_OP_UMINUS:
            return -values[0]
        assert kind == z3.Z3_OP_UNINTERPRETED, x
        return self._known.setdefault((x.decl().name(), *values), self._random())

    def _holds(self, x: Term) -> bool:
        kind = x.decl().kind()
        if kind in COMPARISONS:
            left, right = map(self.value, x.children())
            return COMPARISONS[kind](left, right)  # type: ignore[no-any-return]
        parts = map(self._holds, x.children())
        if kind in (z3.Z3_OP_AND, z3.Z3_OP_TRUE):
            return all(parts)
        if kind in (z3.Z3_OP_OR, z3.Z3_OP_FALSE):
            return any(parts)
        assert kind == z3.Z3_OP_NOT, x
        return not self._holds(x.arg(0))


COMPARISONS = {
    z3.Z3_OP_LE: operator.le, z3.Z3_OP_LT: operator.lt, z3.Z3_OP_GE: operator.ge, z3.Z3_OP_GT: operator.gt,
    z3.Z3_OP_EQ: operator.eq,
}  # fmt: skip
ARITHMETIC: dict[int, Any] = {
    z3.Z3_OP_ADD: operator.add,
    z3.Z3_OP_MUL: operator.mul,
    z3.Z3_OP_SUB: operator.sub,
    z3.Z3_OP_POWER: operator.pow,
}
