"""How much memory a device needs at each op of a program, over the variables of the integer program.

Inputs and weights stay all the time. Of a function, what its callers keep meanwhile counts too. A value in another
layout is there from its first user to its last. So it is what the simulator finds, or a little more.

What lives at an op of a function is the same in all calls of it: so where a solution needs most is found by going
through each function once, and a row of the program is written only for an op that is asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.costs import held_type
from distir_relax.autosharding.graph import Graph
from distir_relax.autosharding.integer_program import IntegerProgram
from distir_relax.ir import Function, Op, TensorType
from distir_relax.layout import DeviceMesh
from distir_relax.ops import lookup
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation

Array = npt.NDArray[Any]
Terms = tuple[Array, Array]
"""Variables, some perhaps more than once, and the bytes of each."""
Path = tuple[tuple[str, int], ...]
"""An op: its function and number there, behind those of the calls that lead to it."""


@dataclass(frozen=True, slots=True)
class Need:
    """What is needed while the op at the end of a `path` runs, in `bytes`, with what stays all the time."""

    bytes: float
    path: Path


@dataclass(slots=True)
class Memory:
    """What lives at each op of a program: items of it, each with its bytes by variable."""

    graph: Graph
    program: IntegerProgram
    _items: list[Terms] = field(default_factory=list)
    _known: dict[Hashable, int] = field(default_factory=dict)
    _live: dict[str, list[list[int]]] = field(default_factory=dict)
    """The items that live at each op of a function; of a call, those outside of the function called."""
    _stays: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        main = self.graph.module.main
        self._stays = [self._value(main.name, item.value.name) for item in main.inputs]
        for function in self.graph.module.functions:
            if function.name in self.graph.counts:
                self._live[function.name] = self._lives(function)

    def needs(self, x: Array) -> list[Need]:
        """For each op of the entry where most is needed with these values of the variables, in it or what it calls."""
        sizes = [float(x[variables] @ held) for variables, held in self._items]
        stays = sum(sizes[item] for item in self._stays)
        worst: dict[str, list[Need]] = {}
        main = self.graph.module.main
        return [Need(need.bytes + stays, need.path) for need in self._needs(main, sizes, worst)]

    def staying(self) -> Terms:
        """The bytes of inputs and weights."""
        return self._sum(self._stays)

    def row(self, path: Path) -> Terms:
        """The bytes of what lives at an op, without what stays all the time."""
        return self._sum([item for function, number in path for item in self._live[function][number]])

    def all(self) -> Array:
        """The bytes of each variable in all that ever lives, each item of it counted once."""
        variables, held = self._sum(range(len(self._items)))
        return np.bincount(variables, held, len(self.program.costs))

    def op(self, path: Path) -> Op:
        """The op at the end of a path."""
        function, number = path[-1]
        return self.graph.module.function(function).ops[number]

    def _needs(self, function: Function, sizes: Sequence[float], worst: dict[str, list[Need]]) -> list[Need]:
        if function.name not in worst:
            found = worst[function.name] = []
            for number, (op, items) in enumerate(zip(function.ops, self._live[function.name], strict=True)):
                here: Path = ((function.name, number),)
                most = sum(sizes[item] for item in items)
                if op.callee:
                    inner = self._needs(self.graph.module.function(op.callee), sizes, worst)
                    deepest = max(inner, key=lambda need: need.bytes, default=Need(0.0, ()))
                    most, here = most + deepest.bytes, (*here, *deepest.path)
                found.append(Need(most, here))
        return worst[function.name]

    def _sum(self, items: Sequence[int]) -> Terms:
        if not items:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        variables, held = zip(*(self._items[item] for item in items), strict=True)
        return np.concatenate(variables), np.concatenate(held)

    def _lives(self, function: Function) -> list[list[int]]:
        name = function.name
        life = _Life.of(function, self.graph)
        found: list[list[int]] = [[] for _ in function.ops]
        marks = {number for number, op in enumerate(function.ops) if not op.callee and is_annotation(op)}
        for number, op in enumerate(function.ops):
            if not op.callee and number not in marks:
                found[number] += self._partials(name, number, op)
        for value, first, last in life.spans():
            item = self._value(name, value)
            for number in range(max(first, 0), min(last + 1, len(function.ops))):
                # What a function gives it counts itself, as it comes to be.
                op = function.ops[number]
                if number not in marks and not (op.callee and any(v.name == value for v in op.results)):
                    found[number].append(item)
        for value, (first, last) in life.uses.items():
            item = self._copies(name, value)
            for number in range(first, last + 1) if len(self._items[item][0]) else ():
                found[number].append(item)
        return found

    def _item(self, key: Hashable, terms: Terms) -> int:
        self._known[key] = len(self._items)
        self._items.append(terms)
        return self._known[key]

    def _value(self, function: str, name: str) -> int:
        """The item of a value, by the ways of what makes it."""
        key = node, result = self.graph.sources[function, name]
        if key in self._known:
            return self._known[key]
        kind = self.graph.type_of(key)
        held = [self._held(kind, way.rests[result]) for way in self.graph.nodes[node].ways]
        return self._item(key, (np.array(self.program.ways[node]), np.array(held)))

    def _copies(self, function: str, name: str) -> int:
        """The item of a value in other layouts."""
        key = source, _ = self.graph.uses[function, name]
        if key in self._known:
            return self._known[key]
        kind, copies = self.graph.type_of(source), self.program.copies[key]
        held = np.array([self._held(kind, lies) for lies in copies.layouts])
        return self._item(key, (copies.variables, copies.shares * held[copies.numbers]))

    def _held(self, kind: TensorType, lies: Placed) -> float:
        return local_bytes(kind, lies, self.graph.space.mesh, self.graph.space.unlike.rooms)

    def _partials(self, function: str, number: int, op: Op) -> list[int]:
        """The items of results before their sums are made."""
        node = self.graph.places[function, number]
        made: list[int] = []
        for result, value in enumerate(op.results):
            key = (node, result, "partial")
            if key not in self._known:
                ways = zip(self.program.ways[node], self.graph.nodes[node].ways, strict=True)
                pending = [(v, way.gives[result]) for v, way in ways if way.gives[result] != way.rests[result]]
                held = [self._held(value.tensor, lies) for _, lies in pending]
                self._item(key, (np.array([v for v, _ in pending], dtype=np.int64), np.array(held)))
            made.append(self._known[key])
        return [item for item in made if len(self._items[item][0])]


@dataclass(frozen=True, slots=True)
class _Life:
    """When the values of a function are there: from the op that makes them to the last that uses them, or a view."""

    first: Mapping[str, int]
    last: Mapping[str, int]
    uses: Mapping[str, tuple[int, int]]
    """The first and the last op that uses a value."""

    @classmethod
    def of(cls, function: Function, graph: Graph) -> _Life:
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
                    lookup(op.name, op.location).shares_storage or graph.takes_as_it_lies(function.name, number)
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
        """Each value with the numbers of the first op at which it is there, and of the last."""
        return ((name, first, self.last[name]) for name, first in self.first.items())


@lru_cache(maxsize=1 << 16)
def local_bytes(kind: TensorType, lies: Placed, mesh: DeviceMesh, rooms: tuple[float, ...] = ()) -> float:
    """What the first device holds of a tensor, which has the largest shards.

    Of devices that are unlike it is what is held by the one for which it is most, counted as on the one with most room:
    `rooms` are the parts that their memory is of that one's.
    """
    if not rooms:
        return float(held_type(kind, lies, mesh, 0).bytes)
    return max(held_type(kind, lies, mesh, device).bytes / room for device, room in enumerate(rooms))
