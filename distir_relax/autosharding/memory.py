"""Memory of a device at each op of a program, as linear terms over the variables of the integer program.

Inputs and weights are live throughout. While a function runs, the live values of its callers count too. A copy of a
value in another layout is live from its first user to its last. So the estimate is that of the simulator, or slightly
more.

Live values of an op in a function are the same in all calls of it: the peak of a solution is found by one walk over
each function (`needs`), and a row of the program is written only for the ops that exceed the limit (`op_terms`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.costs import shard_type
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import IntegerProgram
from distir_relax.ir import Function, Op, TensorType
from distir_relax.layout import DeviceMesh
from distir_relax.ops import lookup
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation

Array = npt.NDArray[Any]
Terms = tuple[Array, Array]
"""Variables, possibly with duplicates, and the bytes of each."""
Path = tuple[tuple[str, int], ...]
"""An op: its function and number there, after those of the calls that lead to it."""


@dataclass(frozen=True, slots=True)
class OpMemory:
    """The `bytes` live while the op at the end of a `path` runs, persistent ones included."""

    bytes: float
    path: Path


@dataclass(slots=True)
class MemoryModel:
    """The live items at each op of a program, each with its bytes by variable."""

    graph: Graph
    program: IntegerProgram
    _items: list[Terms] = field(default_factory=list)
    _item_numbers: dict[Hashable, int] = field(default_factory=dict)
    _live: dict[str, list[list[int]]] = field(default_factory=dict)
    """The live items at each op of a function; of a call, those outside of the callee."""
    _persistent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        main = self.graph.module.main
        self._persistent = [self._value_item(main.name, item.value.name) for item in main.inputs]
        for function in self.graph.module.functions:
            if function.name in self.graph.call_counts:
                self._live[function.name] = self._live_items(function)

    def by_op(self, x: Array) -> list[OpMemory]:
        """Return the memory at each op of the entry, or at the peak inside its callee, for these variables."""
        sizes = [float(x[variables] @ item_bytes) for variables, item_bytes in self._items]
        persistent = sum(sizes[item] for item in self._persistent)
        cache: dict[str, list[OpMemory]] = {}
        main = self.graph.module.main
        return [OpMemory(peak.bytes + persistent, peak.path) for peak in self._peaks(main, sizes, cache)]

    def persistent_terms(self) -> Terms:
        """Return the terms of inputs and weights."""
        return self._terms_of(self._persistent)

    def op_terms(self, path: Path) -> Terms:
        """Return the terms of the values that are live at an op, without persistent ones."""
        return self._terms_of([item for function, number in path for item in self._live[function][number]])

    def total(self) -> Array:
        """Return the bytes of each variable over all items, each counted once."""
        variables, item_bytes = self._terms_of(range(len(self._items)))
        return np.bincount(variables, item_bytes, len(self.program.costs))

    def op(self, path: Path) -> Op:
        """Return the op at the end of a path."""
        function, number = path[-1]
        return self.graph.module.function(function).ops[number]

    def _peaks(self, function: Function, sizes: Sequence[float], cache: dict[str, list[OpMemory]]) -> list[OpMemory]:
        if function.name not in cache:
            by_op = cache[function.name] = []
            for number, (op, items) in enumerate(zip(function.ops, self._live[function.name], strict=True)):
                path: Path = ((function.name, number),)
                total = sum(sizes[item] for item in items)
                if op.callee:
                    callee_needs = self._peaks(self.graph.module.function(op.callee), sizes, cache)
                    peak = max(callee_needs, key=lambda peak: peak.bytes, default=OpMemory(0.0, ()))
                    total, path = total + peak.bytes, (*path, *peak.path)
                by_op.append(OpMemory(total, path))
        return cache[function.name]

    def _terms_of(self, items: Sequence[int]) -> Terms:
        if not items:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        variables, item_bytes = zip(*(self._items[item] for item in items), strict=True)
        return np.concatenate(variables), np.concatenate(item_bytes)

    def _live_items(self, function: Function) -> list[list[int]]:
        name = function.name
        lifetimes = _Lifetimes.of(function, self.graph)
        live: list[list[int]] = [[] for _ in function.ops]
        annotations = {number for number, op in enumerate(function.ops) if not op.callee and is_annotation(op)}
        for number, op in enumerate(function.ops):
            if not op.callee and number not in annotations:
                live[number] += self._partial_items(name, number, op)
        for value, first, last in lifetimes.spans():
            item = self._value_item(name, value)
            for number in range(max(first, 0), min(last + 1, len(function.ops))):
                # The callee counts its results as it computes them.
                op = function.ops[number]
                if number not in annotations and not (op.callee and any(v.name == value for v in op.results)):
                    live[number].append(item)
        for value, (first, last) in lifetimes.uses.items():
            item = self._copies_item(name, value)
            for number in range(first, last + 1) if len(self._items[item][0]) else ():
                live[number].append(item)
        return live

    def _add_item(self, key: Hashable, terms: Terms) -> int:
        self._item_numbers[key] = len(self._items)
        self._items.append(terms)
        return self._item_numbers[key]

    def _value_item(self, function: str, name: str) -> int:
        """Return the item of a value, by the strategies of its producer."""
        key = node, result = self.graph.sources[function, name]
        if key in self._item_numbers:
            return self._item_numbers[key]
        type_ = self.graph.type_of(key)
        item_bytes = [self._bytes(type_, s.final_layouts[result]) for s in self.graph.nodes[node].strategies]
        return self._add_item(key, (np.array(self.program.choices[node]), np.array(item_bytes)))

    def _copies_item(self, function: str, name: str) -> int:
        """Return the item of the copies of a value in other layouts."""
        key = source, _ = self.graph.edge_keys[function, name]
        if key in self._item_numbers:
            return self._item_numbers[key]
        type_, copies = self.graph.type_of(source), self.program.copies[key]
        layout_bytes = np.array([self._bytes(type_, layout) for layout in copies.layouts])
        return self._add_item(key, (copies.variables, copies.coefficients * layout_bytes[copies.layout_numbers]))

    def _bytes(self, type_: TensorType, layout: Placed) -> float:
        return local_bytes(type_, layout, self.graph.space.mesh, self.graph.space.heterogeneity.memory_fractions)

    def _partial_items(self, function: str, number: int, op: Op) -> list[int]:
        """Return the items of results before their partial sums are reduced."""
        node = self.graph.op_nodes[function, number]
        items: list[int] = []
        for result, value in enumerate(op.results):
            key = (node, result, "partial")
            if key not in self._item_numbers:
                strategies = zip(self.program.choices[node], self.graph.nodes[node].strategies, strict=True)
                parts = [
                    (v, s.out_layouts[result])
                    for v, s in strategies
                    if s.out_layouts[result] != s.final_layouts[result]
                ]
                item_bytes = [self._bytes(value.tensor, layout) for _, layout in parts]
                self._add_item(key, (np.array([v for v, _ in parts], dtype=np.int64), np.array(item_bytes)))
            items.append(self._item_numbers[key])
        return [item for item in items if len(self._items[item][0])]


@dataclass(frozen=True, slots=True)
class _Lifetimes:
    """Lifetimes of the values of a function: from the op that makes them to the last use of them or of a view."""

    first: Mapping[str, int]
    last: Mapping[str, int]
    uses: Mapping[str, tuple[int, int]]
    """The first and the last op that uses a value."""

    @classmethod
    def of(cls, function: Function, graph: Graph) -> _Lifetimes:
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        uses: dict[str, tuple[int, int]] = {}
        roots: dict[str, str] = {}
        for number, op in enumerate(function.ops):
            for value in op.operands:
                uses[value.name] = uses.get(value.name, (number, number))[0], number
                root = roots.get(value.name, value.name)
                if root in last:
                    last[root] = number
            for value in op.results:
                if not op.callee and (
                    lookup(op.name, op.location).shares_storage or graph.in_place(function.name, number)
                ):
                    roots[value.name] = roots.get(op.operands[0].name, op.operands[0].name)
                else:
                    first[value.name] = last[value.name] = number
        for output in function.outputs:
            root = roots.get(output.value.name, output.value.name)
            if root in last:
                last[root] = len(function.ops)
        return cls(first, last, uses)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Return each value with the numbers of its first and last live ops."""
        return ((name, first, self.last[name]) for name, first in self.first.items())


@lru_cache(maxsize=1 << 16)
def local_bytes(type_: TensorType, layout: Placed, mesh: DeviceMesh, fractions: tuple[float, ...] = ()) -> float:
    """Return the bytes of a tensor on the first device, which has the largest shards.

    On heterogeneous devices: the largest, each divided by the device's fraction of the largest memory, `fractions`.
    """
    if not fractions:
        return float(shard_type(type_, layout, mesh, 0).bytes)
    return max(shard_type(type_, layout, mesh, device).bytes / part for device, part in enumerate(fractions))
