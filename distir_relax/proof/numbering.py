"""Numbers of the values of whole programs: values with equal numbers are equal, whatever the order of sums.

Redistributions and annotations keep the number of their operand. A sum of tensors of one type has the number of the
bag of its terms, so that the order in which terms are added does not matter. Zeros are no terms, and what is linear in
zeros is zero, such as gradients of results that the loss does not use. Rounding is not compared, nor are nonfinite
numbers: a cast that counts as linear, and back, is the number itself (`autodiff.ReduceGradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.ir import Attribute, DTensorType, Op, TensorType, Value
from distir_relax.ops import Builder, Trait, cast, lookup
from distir_relax.ops.elementwise.casts import LINEAR
from distir_relax.ops.table.entry import OpDef
from distir_relax.proof.expressions import Expressions


@dataclass(slots=True)
class Numbering:
    """Expressions of several programs, whose inputs of the same name and dtype are equal."""

    expressions: Expressions = field(default_factory=Expressions)
    inputs: dict[tuple[str, str], int] = field(default_factory=dict)
    """The numbers of inputs, by name and dtype."""
    terms: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The terms of each number that is a sum."""
    zeros: dict[TensorType, int] = field(default_factory=dict)
    """The number of zeros of each type."""
    _sums: dict[tuple[int, ...], int] = field(default_factory=dict)
    _rounded: dict[int, tuple[TensorType, int]] = field(default_factory=dict)
    """The type and the number of the operand of a number, for casts that count as linear."""
    _zeros: set[int] = field(default_factory=set)

    def input(self, value: Value) -> int:
        """Return the number of an input."""
        key = value.name, plain(value).tensor.dtype
        if key not in self.inputs:
            (self.inputs[key],) = self.expressions.new()
        return self.inputs[key]

    def converted(self, value: Value, dtype: str, number: int | None = None) -> int:
        """Return the number of an input, or of another value with a `number`, after a conversion to a dtype."""
        g = Builder()
        result = cast(g, plain(value), dtype)
        return self.add_all(g.ops, {value.name: self.input(value) if number is None else number})[result.name]

    def add_all(self, ops: Iterable[Op], numbers: dict[str, int]) -> dict[str, int]:
        """Add ops; `numbers` has those of values by name, and gets those of the results."""
        for op in ops:
            found = self.add(op, tuple(numbers[value.name] for value in op.operands), op.attrs)
            numbers.update((value.name, number) for value, number in zip(op.results, found, strict=True))
        return numbers

    def add(self, op: Op, operands: tuple[int, ...], attrs: Mapping[str, Attribute]) -> Sequence[int]:
        """Return the numbers of an op's results, with these numbers of its operands and its attributes."""
        entry = lookup(op.name, op.location)
        if entry.keeps_value:
            return operands[:1]
        if Trait.OWN_GRADIENT in entry.traits:
            return operands[::2]
        given, results = tuple(map(plain, op.operands)), tuple(map(plain, op.results))
        if entry.is_identity(given, results):
            return operands[:1]
        if len(results) == 1 and self._is_zero(entry, op, operands):
            return (self._zero(op, results[0].tensor, operands),)
        if self._is_sum(entry, op, given, results):
            return (self._sum(op, results[0].tensor, operands),)
        if len(operands) == 1 and self._rounded.get(operands[0], ())[:1] == (results[0].type,):
            return (self._rounded[operands[0]][1],)
        is_linear = LINEAR in attrs
        attrs = {name: value for name, value in attrs.items() if name != LINEAR}
        plain_op = Op(op.name, given, results, attrs, op.location)
        found = self.expressions.find(plain_op, operands) or self.expressions.add(plain_op, operands, attrs)
        if is_linear:
            self._rounded[found[0]] = given[0].tensor, operands[0]
        return found

    def _is_sum(self, entry: OpDef, op: Op, operands: Sequence[Value], results: Sequence[Value]) -> bool:
        if Trait.ADDS_IN_ORDER in entry.traits:
            return True
        if Trait.COMMUTATIVE not in entry.traits or len(operands) != 2:
            return False
        is_linear = frozenset({0, 1}) in entry.linear_sets(2, op.attrs)
        return is_linear and all(value.type == results[0].type for value in operands)

    def _is_zero(self, entry: OpDef, op: Op, operands: tuple[int, ...]) -> bool:
        if not operands:
            return Trait.SCALAR in entry.traits and op.attrs.get("value") == 0
        zeros = {index for index, number in enumerate(operands) if number in self._zeros}
        return bool(zeros) and any(group <= zeros for group in entry.linear_sets(len(operands), op.attrs) if group)

    def _zero(self, op: Op, kind: TensorType, operands: tuple[int, ...]) -> int:
        if kind not in self.zeros:
            (self.zeros[kind],) = self.expressions.add(op, operands, op.attrs)
            self._zeros.add(self.zeros[kind])
        return self.zeros[kind]

    def _sum(self, op: Op, kind: TensorType, operands: tuple[int, ...]) -> int:
        zero = self.zeros.get(kind)
        given = [term for number in operands for term in self.terms.get(number, (number,)) if term != zero]
        terms = tuple(sorted(given))
        if len(terms) == 1:
            return terms[0]
        if terms not in self._sums:
            (self._sums[terms],) = self.expressions.new()
            self.terms[self._sums[terms]] = terms
        number = self._sums[terms]
        # Patterns of fused ops find it as an op on these operands.
        made = self.expressions.made.setdefault((op.name, operands), [])
        if not made:
            made.append((op.attrs, (number,)))
        return number


def plain(value: Value) -> Value:
    """Return a value without its layout."""
    return Value(value.name, value.type.tensor) if isinstance(value.type, DTensorType) else value
