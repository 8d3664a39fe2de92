"""The elements of the factors of an op that one device has, by the rows of the dims of the operands there.

A dim of several factors may be a product in several ways, of which those that the other dims allow are tried. A device
that has only padding of such a dim has only padding of one of its factors, and says nothing about the others; one that
has no element at all of an operand says nothing about the factors of its other dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distir_relax.ops.table.positions import PADDING, Vector
from distir_relax.ops.table.rule import BLOCKED, Rule
from distir_relax.proof.pieces import Mismatch, Tables, composed, digits


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of an operand: its factors, its row on a device, and the equality of each factor.

    `equality` is that of a dim whose equal elements are not those of its factors.
    """

    factors: tuple[int, ...]
    row: int
    equalities: tuple[int | None, ...]
    where: str
    equality: int | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """The row of each factor on one device, and the equality by which it contains first elements.

    `lengths` are the numbers of elements of the factors that are a dim of their own, `claims` the rows that those of
    results are claimed to have.
    """

    tables: Tables
    rule: Rule
    lengths: Mapping[int, int]
    claims: dict[int, int]
    rows: dict[int, int]
    equalities: dict[int, int | None]
    overlaid: set[int]
    """The factors of which an operand has elements where another has padding."""

    def copy(self) -> Binding:
        """Return a binding that may be extended."""
        return replace(self, rows=dict(self.rows), equalities=dict(self.equalities), overlaid=set(self.overlaid))

    def unify(self, i: int, row: int, equality: int | None, where: str) -> None:
        """Bind a factor to a row; raise `Mismatch` if it has other elements already, or a part of a blocked one."""
        tables, factor = self.tables, self.rule.factors[i]
        if factor.kind == BLOCKED and row != tables.whole(factor.size, equality):
            raise Mismatch(f"{where} is cut, all of which the op needs")
        if i not in self.rows:
            self.rows[i], self.equalities[i] = row, equality
            return
        known, before = self.rows[i], self.equalities[i]
        if self._fits(i, known, row, before, equality):
            self.rows[i], self.equalities[i] = row, equality
        elif not self._fits(i, row, known, equality, before):
            raise Mismatch(f"{where} is cut in another way than an operand before it")

    def _fits(self, i: int, row: int, other: int, equality: int | None, finer: int | None) -> bool:
        """Whether a row has the first elements that are equal to those of another; of a broadcast dim, padding fits."""
        tables = self.tables
        if not tables.is_finer(finer, equality):
            return False
        first = tables.first(other, equality)
        if first == row:
            return True
        if equality != tables.equal(self.rule.factors[i].size) or len(tables.rows[first]) != len(tables.rows[row]):
            return False
        if not (tables.rows[first] < 0)[tables.rows[row] < 0].all():
            return False
        self.overlaid.add(i)
        return True

    def is_known(self, i: int) -> bool:
        """Whether a factor is bound."""
        return i in self.rows

    def is_claimed(self, i: int, row: int) -> bool:
        """Whether a row of a factor has the elements that it is claimed to have, and perhaps padding."""
        vector, claim = self.tables.rows[row], self.claims.get(i)
        return claim is not None and np.array_equal(vector[vector >= 0], self.tables.rows[claim])

    def length(self, i: int) -> int | None:
        """Return the number of elements of a factor; None if it is not known."""
        return len(self.tables.rows[self.rows[i]]) if i in self.rows else self.lengths.get(i)

    def count(self, factors: Sequence[int]) -> int:
        """Return the number of elements of a dim, those of factors that are bound."""
        return math.prod(len(self.tables.rows[self.rows[i]]) for i in factors if i in self.rows)

    def composed(self, factors: Sequence[int]) -> int:
        """Return the row of a dim."""
        rows, sizes = [self.rows[i] for i in factors], [self.rule.factors[i].size for i in factors]
        return product_of(self.tables, rows, sizes)


def bindings(start: Binding, dims: Sequence[Dim], preferred: Sequence[int]) -> Iterator[Binding]:
    """Iterate over the bindings by which a device has these rows of dims; raise `Mismatch` if there is none.

    The factors in `preferred` are tried first as those of which a device has padding alone.
    """
    single = start.copy()
    for dim in dims:
        if len(dim.factors) == 1:
            single.unify(dim.factors[0], dim.row, dim.equalities[0], dim.where)
    yield from _with_products(single, [dim for dim in dims if len(dim.factors) > 1], preferred)


def _with_products(binding: Binding, dims: Sequence[Dim], preferred: Sequence[int]) -> Iterator[Binding]:
    if not dims:
        yield binding
        return
    dim, *others = dims
    reason = Mismatch(f"{dim.where} is not cut along one of its factors")
    found = False
    for option in options(binding, dim, preferred):
        extended = binding.copy()
        try:
            for i, equality in zip(dim.factors, dim.equalities, strict=True):
                if i in option:
                    extended.unify(i, option[i], equality, dim.where)
            for result in _with_products(extended, others, preferred):
                found = True
                yield result
        except Mismatch as mismatch:
            reason = mismatch
    if not found:
        raise reason


def options(binding: Binding, dim: Dim, preferred: Sequence[int]) -> Iterator[dict[int, int]]:
    """Iterate over the rows of factors whose product is the row of a dim with several, which is not empty."""
    tables = binding.tables
    sizes = [binding.rule.factors[i].size for i in dim.factors]
    wholes = [tables.whole(size, equality) for size, equality in zip(sizes, dim.equalities, strict=True)]
    if dim.row == product_of(tables, wholes, sizes):
        yield dict(zip(dim.factors, wholes, strict=True))
    elif tables.has_elements(dim.row):
        lengths = [binding.length(i) for i in dim.factors]
        found = [
            {i: tables.row(vector) for i, vector in zip(dim.factors, vectors, strict=True)}
            for row in _equal_rows(tables, dim)
            for vectors in digits(row, sizes, lengths)
        ]
        yield from sorted(found, key=lambda option: -sum(binding.is_claimed(i, row) for i, row in option.items()))
    elif any(binding.is_known(i) and not tables.has_elements(binding.rows[i]) for i in dim.factors):
        yield {}
    else:
        free = [i for i in dim.factors if not binding.is_known(i)]
        for i in sorted(free, key=lambda i: preferred.index(i) if i in preferred else len(preferred)):
            others = math.prod(binding.length(j) or binding.rule.factors[j].size for j in dim.factors if j != i)
            if len(tables.rows[dim.row]) % others == 0:
                yield {i: tables.row(np.full(len(tables.rows[dim.row]) // others, PADDING))}


def product_of(tables: Tables, rows: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the row of a dim from those of its factors, outermost first."""
    if len(rows) == 1:
        return rows[0]
    if all(row == tables.range(size) for row, size in zip(rows, sizes, strict=True)):
        return tables.range(math.prod(sizes))
    return tables.row(composed([tables.rows[row] for row in rows], sizes))


def _equal_rows(tables: Tables, dim: Dim) -> list[Vector]:
    """Return the row of a dim, or the consecutive elements that are equal to those of the row."""
    row = tables.rows[dim.row]
    if dim.equality is None:
        return [row]
    firsts, inside = tables.rows[dim.equality], row >= 0
    places = np.flatnonzero(inside)
    starts = range(len(firsts) - int(places.max()))
    fitting = [i for i in starts if np.array_equal(firsts[i + places], row[inside])]
    return [np.where(inside, np.arange(i, i + len(row)), PADDING) for i in fitting]
