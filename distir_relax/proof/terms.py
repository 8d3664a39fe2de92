"""The tensors of a sharded program by number, with what a schedule is compared with: ops, equal elements, layouts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distir_relax.ir import Attribute, DTensorType, Function, Op, TensorType, Value
from distir_relax.ops import Routing, Trait, evaluate, lookup
from distir_relax.ops.table.entry import OpDef
from distir_relax.ops.table.positions import Positions
from distir_relax.proof.expressions import Expressions
from distir_relax.proof.local_ops import Instance
from distir_relax.proof.pieces import Equalities, Tables

_FEW = 1 << 16
"""The elements of a tensor up to which its other shapes are followed."""


class Terms:
    """The tensors of a sharded program, by number: equal expressions have one, and redistribution keeps it."""

    def __init__(self, function: Function, original: Function) -> None:
        self.tables = Tables()
        self.attributes = Attributes()
        self.expressions = Expressions()
        self.numbers: dict[str, int] = {}
        self.types: dict[int, TensorType] = {}
        self.equalities: dict[int, Equalities] = {}
        """Those of the dims of each tensor."""
        self.instances: dict[tuple[str, tuple[int, ...]], list[tuple[Instance, tuple[int, ...]]]] = {}
        """Ops by name and numbers of operands, with the numbers of their results."""
        self.expandable: list[Expandable] = []
        self.constants: dict[int, float] = {}
        self.layouts: defaultdict[int, dict[DTensorType, DTensorType]] = defaultdict(dict)
        """The layouts that the sharded program has of each tensor, each with its symbolic form."""
        self.routed: dict[tuple[int, int], set[int]] = {}
        """By rows and the groups of each, of rows that are sent by data: the tensors with the numbers of all groups."""
        self.shapes: dict[int, list[int]] = {}
        """For each tensor that has them, the tensors of its elements in other shapes, and itself."""
        self.sources: dict[int, Op] = {}
        """The ops without operands, by the numbers of their results."""
        self.shares: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        """The tensors of the terms of sums (`share`), each with the sum, the axis, and the coordinates of a device."""
        self._share_numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._instances: dict[object, tuple[Instance, list[Equalities]]] = {}
        for item, symbolic in zip(function.inputs, original.inputs, strict=True):
            (number,) = self.expressions.new()
            self.equalities[number] = (None,) * len(item.value.dtensor.shape)
            self._name(item.value, symbolic.value, number)
        for op, symbolic_op in zip(function.ops, original.ops, strict=True):
            self._add(op, symbolic_op)
        ends = np.cumsum([0, *(max(1, self.types[n].elements) for n in range(self.expressions.count))])
        self.bases = [int(end) for end in ends]
        """The number of the first element of each tensor among those of all."""

    def share(self, term: int, axis: int, place: tuple[int, ...]) -> int:
        """Return the tensor of the terms that a device adds to a pending sum along an axis, by its coordinates."""
        key = term, axis, place
        if key not in self._share_numbers:
            number = self._share_numbers[key] = len(self.bases) - 1
            self.shares[number] = key
            self.types[number], self.equalities[number] = self.types[term], (None,) * len(self.types[term].shape)
            self.bases.append(self.bases[-1] + max(1, self.types[term].elements))
        return self._share_numbers[key]

    def term_at(self, number: int) -> int:
        """Return the tensor that an element belongs to, by its number among those of all."""
        return bisect_right(self.bases, number) - 1

    def _add(self, op: Op, symbolic: Op) -> None:
        entry = lookup(op.name, op.location)
        operands = tuple(self.numbers[v.name] for v in op.operands)
        kinds = [Value(v.name, v.dtensor.tensor) for v in (*op.operands, *op.results)]
        if entry.keeps_value or entry.is_identity(kinds[: len(operands)], kinds[len(operands) :]):
            self._name(op.results[0], symbolic.results[0], operands[0])
            return
        if entry.split.routing in (Routing.DISPATCH, Routing.COMBINE) and self._is_numbered(operands[2]):
            # Rows are the same rows, wherever they are.
            self._name(op.results[0], symbolic.results[0], operands[0])
            self.routed.setdefault((operands[0], operands[1]), set()).add(operands[2])
            self.instances.setdefault((op.name, operands), [(self._instance(op, operands)[0], operands[:1])])
            return
        before = self.expressions.count
        results = self.expressions.add(op, operands, op.attrs)
        for value, original, number in zip(op.results, symbolic.results, results, strict=True):
            self._name(value, original, number)
        if self.expressions.count > before:
            instance, equalities = self._instance(op, operands)
            self.equalities.update(zip(results, equalities, strict=True))
            self.instances.setdefault((op.name, operands), []).append((instance, results))
            if not operands:
                self.sources[results[0]] = op
            if self._keeps_elements(op, entry):
                shapes = self.shapes.setdefault(operands[0], [operands[0]])
                shapes.append(results[0])
                self.shapes[results[0]] = shapes
            if entry.split.expand:
                self.expandable.append(Expandable(instance, symbolic, operands, results))
            constant = op.attrs.get("value")
            if Trait.SCALAR in entry.traits and isinstance(constant, (int, float)):
                self.constants[results[0]] = float(constant)

    def _name(self, value: Value, symbolic: Value, number: int) -> None:
        self.numbers[value.name] = number
        self.types[number] = value.dtensor.tensor
        self.layouts[number].setdefault(value.dtensor, symbolic.dtensor)

    def _instance(self, op: Op, operands: Sequence[int]) -> tuple[Instance, list[Equalities]]:
        """Return the instance of an op, and the equalities of its results; equal instances are one object."""
        kinds = tuple(v.dtensor.tensor for v in op.operands)
        results = tuple(v.dtensor.tensor for v in op.results)
        equalities = tuple(self.equalities[number] for number in operands)
        key = (op.name, self.attributes.of(op), kinds, results, equalities)
        if key not in self._instances:
            instance = Instance(op, kinds, results, equalities)
            self._instances[key] = instance, instance.equalities_of_results(self.tables)
        return self._instances[key]

    def _is_numbered(self, number: int) -> bool:
        """Whether a tensor has the numbers from 0 on."""
        op = self.sources.get(number)
        return op is not None and bool(np.array_equal(evaluate(op, [])[0], np.arange(self.types[number].elements)))

    def _keeps_elements(self, op: Op, entry: OpDef) -> bool:
        """Whether an op on a tensor, which is not large, gives its elements in the same order."""
        if entry.semantics.moved is None or len(op.operands) != 1 or len(op.results) != 1:
            return False
        kinds = [value.dtensor.tensor for value in (*op.operands, *op.results)]
        if kinds[0].elements != kinds[1].elements or not 0 < kinds[0].elements <= _FEW:
            return False
        numbered = [[np.arange(n) * stride_of(k.shape, dim) for dim, n in enumerate(k.shape)] for k in kinds]
        return same_positions(entry.semantics.moved(numbered[:1], op.attrs)[0], numbered[1])


@dataclass(frozen=True, slots=True)
class Expandable:
    """An op with `Split.expand`, its form with symbolic sizes, and the numbers of its operands and results."""

    instance: Instance
    original: Op
    operands: tuple[int, ...]
    results: tuple[int, ...]


class Attributes:
    """Numbers of attributes: equal ones have one, numbers of different kinds differ."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._of_ops: dict[int, int] = {}
        """By the identity of an op's attributes, which many ops share."""

    def of(self, op: Op) -> int:
        """Return the number of the attributes of an op, which lives as long as this."""
        found = self._of_ops.get(id(op.attrs))
        if found is None:
            found = self._of_ops[id(op.attrs)] = self.number(op.attrs)
        return found

    def number(self, attrs: Mapping[str, Attribute]) -> int:
        """Return the number of attributes."""
        key = tuple((name, repr(value)) for name, value in sorted(attrs.items()))
        return self._numbers.setdefault(key, len(self._numbers))


def same_positions(vectors: Positions, others: Positions) -> bool:
    """Whether elements have the same numbers, dim by dim."""
    return len(vectors) == len(others) and all(map(np.array_equal, vectors, others))


def stride_of(shape: Sequence[int], dim: int) -> int:
    """Return how far elements that are neighbours along a dim are apart in the order of all."""
    return math.prod(max(1, size) for size in shape[dim + 1 :])
