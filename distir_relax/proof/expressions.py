"""Numbers of expressions: two values have the same number if the same ops compute them from the same inputs.

A fused op has the number of the ops that it stands for (`Code.patterns`), a joined one those of its instances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from distir_relax.ir import Attribute, Op
from distir_relax.ops import Trait, lookup
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.patterns import Bound, Capture, Pattern, fusions, join_bounds, match_attribute
from distir_relax.ops.table.table import TABLE, Table


@dataclass(slots=True)
class Expressions:
    """Expressions that were added, with the number of each result.

    `made` maps an op's name and the numbers of its operands to the attributes and results of each op with them.
    """

    numbers: dict[object, tuple[int, ...]] = field(default_factory=dict)
    made: dict[tuple[str, tuple[int, ...]], list[tuple[Mapping[str, Attribute], tuple[int, ...]]]] = field(
        default_factory=dict
    )
    scalars: list[tuple[float, int]] = field(default_factory=list)
    """The value and the number of each scalar constant."""
    count: int = 0

    def new(self, results: int = 1) -> tuple[int, ...]:
        """Return numbers that no expression has."""
        self.count += results
        return tuple(range(self.count - results, self.count))

    def add(self, op: Op, operands: tuple[int, ...], attrs: Mapping[str, Attribute]) -> tuple[int, ...]:
        """Return the numbers of an op's results, with numbers of its operands and its attributes; add it if need be."""
        key = _key(op.name, operands, attrs)
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = self.new(len(op.results))
            self.made.setdefault((op.name, operands), []).append((attrs, found))
            value = attrs.get("value")
            if Trait.SCALAR in lookup(op.name, op.location).traits and isinstance(value, (int, float)):
                self.scalars.append((value, found[0]))
        return found

    def find(self, op: Op, operands: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the numbers of an op's results, whose operands have these numbers; None if nothing like it was added.

        The op may be fused or joined.
        """
        found = self.numbers.get(_key(op.name, operands, op.attrs))
        if found is not None:
            return found
        return self._find_fused(op, operands) or self._find_joined(op, operands)

    def _find_fused(self, op: Op, operands: tuple[int, ...]) -> tuple[int, ...] | None:
        entry = lookup(op.name, op.location)
        shapes = [value.tensor.shape for value in op.operands]
        for pattern in TABLE.derived(_patterns).get(op.name, ()):
            for number, bound in self._matches(pattern, operands):
                captured = {key: value for key, value in bound.items() if isinstance(key, str)}
                attrs = entry.code.fused_attrs(shapes, captured) if entry.code.fused_attrs else captured
                if attrs == op.attrs:
                    return (number,)
        return None

    def _matches(self, pattern: Pattern, operands: Sequence[int]) -> Iterator[tuple[int, Bound]]:
        """Iterate over the numbers of expressions that match a pattern on `operands`, with its captures."""
        options = [list(self._arguments(argument, operands)) for argument in pattern.arguments]
        orders = [options]
        if Trait.COMMUTATIVE in lookup(pattern.name).traits:
            orders.append(options[::-1])
        for order in orders:
            for chosen in product(*order):
                bound = join_bounds(captured for _, captured in chosen)
                if bound is None:
                    continue
                for attrs, results in self.made.get((pattern.name, tuple(number for number, _ in chosen)), ()):
                    parts = [match_attribute(template, attrs.get(key)) for key, template in pattern.attrs]
                    joined = join_bounds([bound, *parts])
                    if joined is not None:
                        yield results[0], joined

    def _arguments(
        self, argument: Pattern | Capture | int | float, operands: Sequence[int]
    ) -> Iterator[tuple[int, Bound]]:
        if isinstance(argument, Pattern):
            yield from self._matches(argument, operands)
        elif isinstance(argument, int):
            yield operands[argument], {}
        elif isinstance(argument, Capture):
            for value, number in self.scalars:
                yield number, {argument.name: value}
        else:
            for value, number in self.scalars:
                if math.isclose(value, argument, rel_tol=1e-6):
                    yield number, {}

    def _find_joined(self, op: Op, operands: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the numbers of the results of an op that computes several instances with the same operand 0."""
        size = (len(operands) - 1) // len(op.results)
        for entry in TABLE.derived(_joined).get(op.name, ()):
            if size * len(op.results) != len(operands) - 1:
                continue
            found = []
            for start, result in zip(range(1, len(operands), size), op.results, strict=True):
                own = (op.operands[0], *op.operands[start : start + size])
                instance = Op(entry.name, own, (result,), op.attrs, op.location)
                found.append(self.find(instance, (operands[0], *operands[start : start + size])))
            if None not in found:
                return tuple(numbers[0] for numbers in found if numbers is not None)
        return None


def _patterns(table: Table) -> dict[str, list[Pattern]]:
    """Return the patterns of each fused op."""
    found: dict[str, list[Pattern]] = {}
    for name, pattern in fusions():
        found.setdefault(name, []).append(pattern)
    return found


def _joined(table: Table) -> dict[str, list[OpDef]]:
    """Return the ops of which each joined op computes several."""
    found: dict[str, list[OpDef]] = {}
    for entry in table.entries():
        if entry.code.joined:
            found.setdefault(entry.code.joined, []).append(entry)
    return found


def _key(name: str, operands: tuple[int, ...], attrs: Mapping[str, Attribute]) -> object:
    # True equals 1: attributes are compared with their kinds.
    items = sorted((key, value, type(value).__name__) for key, value in attrs.items())
    return name, operands, tuple(items)
