"""Which op of a program uses what: nodes that choose a way, and the values between them.

A function is there once, however often it is called: its inputs are nodes of their own, which all of its calls have to
meet. So the size of the graph is that of the program as it is written.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.op_strategies import Space, Way
from distir_relax.autosharding.symmetry import alike
from distir_relax.ir import Function, Instance, Module, Op, Repeated, TensorType, Value
from distir_relax.layout import Partial
from distir_relax.ops import lookup
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation

Source = tuple[int, int]
"""A node, and which of its results."""
User = tuple[int, int]
"""A node, and which of its operands."""
Use = tuple[Source, tuple[User, ...]]
"""Where a value is made, and who needs it."""
Array = npt.NDArray[Any]
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The moves of a value to one user that are looked at: from layouts that are `left`, which have numbers, to those
    `taken`; `may` says it of each number of the one (row) and of the other (column)."""

    left: Mapping[Placed, int]
    taken: Mapping[Placed, int]
    may: Array

    def among(self, left: Sequence[Placed], taken: Sequence[Placed]) -> Array:
        """Whether each move from some of those layouts (row) to some of those (column) is."""
        found: Array = self.may[np.ix_([self.left[lies] for lies in left], [self.taken[lies] for lies in taken])]
        return found


@dataclass(frozen=True, slots=True)
class Node:
    """Something that is done in one of several `ways`, `count` times: an op, or taking an input where `op` is None."""

    op: Op | None
    value: Value
    role: str
    ways: tuple[Way, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A value on its way from where it is made to the `users` that need it, `count` times.

    What several users need in the same layout is brought there once. Those `in_place` take it as it lies: they update
    it where it is. Where there are `moves`, all others are out.
    """

    source: Source
    users: tuple[User, ...]
    count: int
    in_place: frozenset[User] = frozenset()
    moves: Mapping[User, Moves] | None = None

    @property
    def use(self) -> Use:
        """What it is known by."""
        return self.source, self.users

    def may_move(self, user: User, source: Placed, target: Placed) -> bool:
        """Whether the value may be left in the one layout, and taken by a user in the other: a sum is made once."""
        if self.moves is not None and not self.moves[user].among((source,), (target,)).item():
            return False
        pends = any(isinstance(t, Partial) and s != t for s, t in zip(source, target, strict=True))
        return source == target or (user not in self.in_place and not pends)


@dataclass(slots=True)
class Graph:
    """The nodes and edges of a module of the global stage; `whole` is its entry, with calls written out."""

    module: Module
    space: Space
    whole: Function
    nodes: list[Node] = field(default_factory=list)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    """The node of each op of each function, by its number there."""
    inputs: dict[tuple[str, str], int] = field(default_factory=dict)
    """The node of each input of each function."""
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)
    """Where each value of each function is made."""
    uses: dict[tuple[str, str], Use] = field(default_factory=dict)
    """On which edge each value of each function is."""
    marks: dict[int, Op] = field(default_factory=dict)
    """The user's marks, by their numbers in the program written out."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How often each function runs that does."""
    moves: Mapping[Use, Mapping[User, Moves]] = field(default_factory=dict)
    """The moves on an edge, where not all of them are looked at."""
    _edges: Counter[Use] = field(default_factory=Counter)
    _times: _Times = field(init=False)
    _alike: dict[Hashable, int] = field(default_factory=dict)
    _built: set[str] = field(default_factory=set)
    _in_place: set[tuple[int, int]] = field(default_factory=set)
    _values: dict[str, Value] = field(default_factory=dict)
    _roles: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _once: dict[Callable[[Graph], object], object] = field(default_factory=dict)

    def build(self, instance: Instance) -> None:
        """Add the entry function, of which `instance` is how it is in the program written out."""
        self._values = {i.value.name: i.value for i in self.whole.inputs}
        self._values.update((v.name, v) for op in self.whole.ops for v in op.results)
        self._times = _Times.of(self.module)
        self.counts = self._times.functions()
        self._function(instance)

    @property
    def edges(self) -> list[Edge]:
        """All edges."""
        return [
            Edge(*use, count, frozenset(self._in_place.intersection(use[1])), self.moves.get(use))
            for use, count in self._edges.items()
        ]

    def once(self, find: Callable[[Graph], _Found]) -> _Found:
        """What `find` finds of the graph, which has to be built: it is called for it once."""
        if find not in self._once:
            self._once[find] = find(self)
        return cast(_Found, self._once[find])

    def narrowed(self, nodes: Sequence[Node], moves: Mapping[Use, Mapping[User, Moves]] | None = None) -> Graph:
        """The graph with `nodes` of fewer ways in their places, and if they are given with fewer `moves`."""
        found = copy.copy(self)
        found.nodes, found._once = list(nodes), {}
        found.moves = self.moves if moves is None else moves
        return found

    def takes_as_it_lies(self, function: str, number: int) -> bool:
        """Whether an op takes its first operand where it is, so that what it gives needs no room of its own."""
        return (self.places[function, number], 0) in self._in_place

    def type_of(self, source: Source) -> TensorType:
        """The type of a value."""
        node = self.nodes[source[0]]
        return (node.value if node.op is None else node.op.results[source[1]]).tensor

    def is_priced(self, node: Node) -> bool:
        """Whether a node does something: a mark does not."""
        return node.op is not None and not is_annotation(node.op)

    def roles(self, number: int) -> tuple[str, ...]:
        """Of the operands of a node, the roles of those that are inputs, as they come; empty for others."""
        found = self._roles.get(number)
        return found if found is not None else ()

    def _function(self, instance: Instance) -> None:
        function = instance.function
        name, count = function.name, self.counts[function.name]
        times = self._times.value if function is self.module.main else lambda name: 1
        for place in instance.ops:
            if isinstance(place, Instance) and place.function.name not in self._built:
                self._built.add(place.function.name)
                self._function(place)
        keys = alike(function, self._taken_as, self._given_as)
        for item, key in zip(function.inputs, keys.inputs, strict=True):
            flat = self._values[instance.names[item.value.name]]
            ways = tuple(Way((), (lies,), (lies,)) for lies in self.space.layouts(flat))
            mine = self._node((name, "input", key), None, item.value, item.role, ways, count)
            self.inputs[name, item.value.name] = mine
            self.sources[name, item.value.name] = mine, 0
        used: dict[str, list[tuple[int, int]]] = {}
        for number, (op, place) in enumerate(zip(function.ops, instance.ops, strict=True)):
            if isinstance(place, Instance):
                self._call(name, op, place, used)
                continue
            made = tuple(self.sources[name, v.name] for v in op.operands)
            ways = self.space.ways(place, self.whole.ops[place])
            if is_annotation(op):
                self.marks[place] = op
            mine = self._node(
                (name, "op", keys.ops[number]), op, op.results[0], "", ways, count * times(op.results[0].name)
            )
            self.places[name, number] = mine
            self._roles[mine] = tuple(self.nodes[node].role for node, _ in made)
            for operand, value in enumerate(op.operands):
                used.setdefault(value.name, []).append((mine, operand))
            for result, value in enumerate(op.results):
                self.sources[name, value.name] = mine, result
        self._keep_in_place(function)
        for value_name, users in used.items():
            use = self.uses[name, value_name] = self.sources[name, value_name], tuple(sorted(set(users)))
            self._edges[use] += count * times(value_name)

    def _node(
        self, key: Hashable, op: Op | None, value: Value, role: str, ways: tuple[Way, ...], count: int
    ) -> int:  # fmt: skip
        """The number of the node of an op or an input: the one that it is like, or a new one."""
        found = self._alike.setdefault((key, ways), len(self.nodes))
        if found == len(self.nodes):
            self.nodes.append(Node(op, value, role, ways, count))
        else:
            self.nodes[found] = replace(self.nodes[found], count=self.nodes[found].count + count)
        return found

    def _taken_as(self, callee: str, operand: int) -> Hashable:
        """The node as which a function takes an operand."""
        return self.inputs[callee, self.module.function(callee).inputs[operand].value.name]

    def _given_as(self, callee: str, result: int) -> Hashable:
        """Where a function makes a result."""
        return self.sources[callee, self.module.function(callee).outputs[result].value.name]

    def _keep_in_place(self, function: Function) -> None:
        """Note who updates what it takes, and the marks on that; an input with one mark lies so from the beginning."""
        marked = Counter(op.operands[0].name for op in function.ops if not op.callee and is_annotation(op))
        updated = {item.value.name for item in function.inputs if marked[item.value.name] == 1}
        for number in reversed(range(len(function.ops))):
            op = function.ops[number]
            if op.callee:
                continue
            marks = is_annotation(op) and (op.results[0].name in updated or op.operands[0].name in updated)
            if marks or lookup(op.name, op.location).code.in_place:
                updated.add(op.operands[0].name)
                self._in_place.add((self.places[function.name, number], 0))

    def _call(
        self, caller: str, op: Op, instance: Instance, used: dict[str, list[tuple[int, int]]]
    ) -> None:  # fmt: skip
        callee = instance.function
        for item, value in zip(callee.inputs, op.operands, strict=True):
            user = self.inputs[callee.name, item.value.name], 0
            used.setdefault(value.name, []).append(user)
        for output, value in zip(callee.outputs, op.results, strict=True):
            self.sources[caller, value.name] = self.sources[callee.name, output.value.name]


@dataclass(frozen=True, slots=True)
class _Times:
    """How often what is written in a module is done: of microbatches that do the same one is written for all."""

    module: Module
    part_of: Mapping[str, int]
    stands_for: Sequence[int]

    @staticmethod
    def of(module: Module) -> _Times:
        record = next((record for record in module.records if isinstance(record, Repeated)), None)
        if record is None:
            return _Times(module, {}, ())
        return _Times(module, record.part_of, [len(numbers) for numbers in record.ranges])

    def value(self, name: str) -> int:
        """How many of a value of the entry there are."""
        part = self.part_of.get(name, -1)
        return self.stands_for[part] if part >= 0 else 1

    def functions(self) -> dict[str, int]:
        """How often each function runs."""
        counts: Counter[str] = Counter()

        def visit(function: Function, times: int) -> None:
            counts[function.name] += times
            for op in function.ops:
                if op.callee:
                    more = self.value(op.results[0].name) if function is self.module.main else 1
                    visit(self.module.function(op.callee), times * more)

        visit(self.module.main, 1)
        return counts
