"""How much memory a device needs at each op of a program, as rows over the variables of the integer program.

Inputs and weights stay all the time. Of a function, what its callers keep meanwhile counts too. A value in another
layout is there from its first user to its last. So it is what the simulator finds, or a little more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from distir_relax.ir import DTensorType, Function, Op, TensorType
from distir_relax.layout import DeviceMesh, Placement, Shard, held_intervals
from distir_relax.ops import lookup
from distir_relax.planner.placements.graph import Graph
from distir_relax.planner.placements.integer_program import IntegerProgram
from distir_relax.sharding.choice import Placed

Terms = dict[int, float]
"""Bytes by variable."""


@dataclass(frozen=True, slots=True)
class Row:
    """What lives while `op` of `function` runs, besides what stays all the time."""

    function: str
    op: Op
    terms: Mapping[int, float]


@dataclass(slots=True)
class MemoryRows:
    """The rows of a program: one for each op in each way in which its function is called, equal ones once."""

    graph: Graph
    program: IntegerProgram
    staying: Terms = field(default_factory=dict)
    """The inputs and weights of the program."""
    found: list[Row] = field(default_factory=list)
    _seen: set[tuple[tuple[int, float], ...]] = field(default_factory=set)
    _visited: set[tuple[str, tuple[tuple[int, float], ...]]] = field(default_factory=set)

    def rows(self) -> list[Row]:
        """All of them."""
        main = self.graph.module.main
        for item in main.inputs:
            self._add(self.staying, self._value(main.name, item.value.name))
        self._function(main, {}, frozenset(item.value.name for item in main.inputs))
        return self.found

    def _function(self, function: Function, outside: Terms, held: frozenset[str]) -> None:
        """The rows of a function while `outside` lives; its inputs of the names `held` are in that."""
        key = (function.name, tuple(sorted(outside.items())))
        if key in self._visited:
            return
        self._visited.add(key)
        live = _Life.of(function, held)
        for number, op in enumerate(function.ops):
            terms: Terms = defaultdict(float, outside)
            for name in live.at(number):
                self._add(terms, self._value(function.name, name))
            for name in live.copies(number):
                self._add(terms, self._copies(function.name, name))
            if op.callee:
                self._call(function, op, terms, live, number)
                continue
            node = self.graph.places[function.name, number]
            for result, value in enumerate(op.results):
                for variable, way in zip(self.program.ways[node], self.graph.nodes[node].ways, strict=True):
                    if way.gives[result] != way.rests[result]:
                        terms[variable] += local_bytes(value.tensor, way.gives[result], self.graph.space.mesh)
            self._keep(function.name, op, terms)

    def _call(self, function: Function, op: Op, terms: Terms, live: _Life, number: int) -> None:
        callee = self.graph.module.function(op.callee)
        outside = terms
        # What the function gives it counts itself, as it comes to be.
        for value in op.results:
            if live.counts(value.name, number):
                self._add(outside, self._value(function.name, value.name), -1.0)
        kept = frozenset(item.value.name for item in callee.inputs)
        self._function(callee, {v: n for v, n in outside.items() if n}, kept)

    def _keep(self, function: str, op: Op, terms: Terms) -> None:
        row = tuple(sorted((variable, size) for variable, size in terms.items() if size))
        if row not in self._seen:
            self._seen.add(row)
            self.found.append(Row(function, op, dict(row)))

    def _value(self, function: str, name: str) -> Terms:
        """The bytes of a value by the ways of what makes it."""
        node, result = self.graph.sources[function, name]
        kind = self.graph.type_of((node, result))
        mesh = self.graph.space.mesh
        ways = zip(self.program.ways[node], self.graph.nodes[node].ways, strict=True)
        return {variable: local_bytes(kind, way.rests[result], mesh) for variable, way in ways}

    def _copies(self, function: str, name: str) -> Terms:
        """The bytes of a value in other layouts."""
        source = self.graph.sources[function, name]
        kind, mesh = self.graph.type_of(source), self.graph.space.mesh
        found: Terms = {}
        for target, made in self.program.copies.get(self.graph.uses[function, name], ()):
            size = local_bytes(kind, target, mesh)
            self._add(found, {variable: share * size for variable, share in made.items()})
        return found

    @staticmethod
    def _add(terms: Terms, more: Mapping[int, float], sign: float = 1.0) -> None:
        for variable, size in more.items():
            terms[variable] = terms.get(variable, 0.0) + sign * size


@dataclass(frozen=True, slots=True)
class _Life:
    """When the values of a function are there: from the op that makes them to the last that uses them, or a view."""

    first: Mapping[str, int]
    last: Mapping[str, int]
    first_use: Mapping[str, int]
    last_use: Mapping[str, int]

    @classmethod
    def of(cls, function: Function, held: frozenset[str]) -> _Life:
        first = {item.value.name: -1 for item in function.inputs if item.value.name not in held}
        last = dict(first)
        first_use: dict[str, int] = {}
        last_use: dict[str, int] = {}
        roots: dict[str, str] = {}
        for number, op in enumerate(function.ops):
            for value in op.operands:
                first_use.setdefault(value.name, number)
                last_use[value.name] = number
                root = roots.get(value.name, value.name)
                if root in last:
                    last[root] = number
            for value in op.results:
                if not op.callee and lookup(op.name, op.location).shares_storage:
                    roots[value.name] = roots.get(op.operands[0].name, op.operands[0].name)
                else:
                    first[value.name] = last[value.name] = number
        for output in function.outputs:
            root = roots.get(output.value.name, output.value.name)
            if root in last:
                last[root] = len(function.ops)
        return cls(first, last, first_use, last_use)

    def at(self, number: int) -> Iterator[str]:
        """The values that are there while an op runs."""
        return (name for name, first in self.first.items() if first <= number <= self.last[name])

    def counts(self, name: str, number: int) -> bool:
        """Whether a value is among those at an op."""
        return name in self.first and self.first[name] <= number <= self.last[name]

    def copies(self, number: int) -> Iterator[str]:
        """The values that may be there in another layout while an op runs."""
        return (name for name, first in self.first_use.items() if first <= number <= self.last_use[name])


@lru_cache(maxsize=1 << 16)
def local_bytes(kind: TensorType, lies: Placed, mesh: DeviceMesh) -> float:
    """What the first device holds of a tensor, which has the largest shards."""
    shape = list(kind.shape)
    for dim, size in enumerate(kind.shape):
        cut: list[Placement] = [p for p in lies if isinstance(p, Shard) and p.dim == dim]
        if cut:
            shape[dim] = sum(b - a for a, b in held_intervals(lies, dim, size, mesh.coordinates(0)))
    return float(DTensorType(tuple(shape), kind.dtype, lies).tensor.bytes)
