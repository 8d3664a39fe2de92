"""Which op of a program uses what: nodes that choose a way, and the values between them.

A function is there once, however often it is called: its inputs are nodes of their own, which all of its calls have to
meet. So the size of the graph is that of the program as it is written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from distir_relax.ir import Function, Instance, Module, Op, TensorType, Value
from distir_relax.planner.placements.space import Space, Way
from distir_relax.sharding.factors import is_annotation

Source = tuple[int, int]
"""A node, and which of its results."""
Use = tuple[Source, tuple[tuple[int, int], ...]]
"""Where a value is made, and who needs it: (node, operand number)."""


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
    """A value on its way from where it is made to the `users` that need it: (node, operand number); `count` times.

    What several users need in the same layout is brought there once.
    """

    source: Source
    users: tuple[tuple[int, int], ...]
    count: int


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
    _edges: Counter[Use] = field(default_factory=Counter)
    _values: dict[str, Value] = field(default_factory=dict)
    _roles: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def build(self, instance: Instance) -> None:
        """Add the entry function, of which `instance` is how it is in the program written out."""
        self._values = {i.value.name: i.value for i in self.whole.inputs}
        self._values.update((v.name, v) for op in self.whole.ops for v in op.results)
        counts = _counts(self.module)
        self._function(instance, counts)

    @property
    def edges(self) -> list[Edge]:
        """All edges."""
        return [Edge(source, users, count) for (source, users), count in self._edges.items()]

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

    def _function(self, instance: Instance, counts: Mapping[str, int]) -> None:
        function = instance.function
        name, count = function.name, counts[function.name]
        alike: dict[object, int] = {}
        for item, key in zip(function.inputs, _passed_on(function), strict=True):
            node = alike.setdefault(key, len(self.nodes))
            self.inputs[name, item.value.name] = node
            self.sources[name, item.value.name] = node, 0
            if node == len(self.nodes):
                flat = self._values[instance.names[item.value.name]]
                ways = tuple(Way((), (lies,), (lies,)) for lies in self.space.layouts(flat))
                self.nodes.append(Node(None, item.value, item.role, ways, count))
        used: dict[str, list[tuple[int, int]]] = {}
        for number, (op, place) in enumerate(zip(function.ops, instance.ops, strict=True)):
            if isinstance(place, Instance):
                self._call(name, op, place, counts, used)
                continue
            mine = self.places[name, number] = len(self.nodes)
            ways = self.space.ways(place, self.whole.ops[place])
            self.nodes.append(Node(op, op.results[0], "", ways, count))
            made = [self.nodes[self.sources[name, v.name][0]] for v in op.operands]
            self._roles[mine] = tuple(node.role for node in made)
            for operand, value in enumerate(op.operands):
                used.setdefault(value.name, []).append((mine, operand))
            for result, value in enumerate(op.results):
                self.sources[name, value.name] = mine, result
        for value_name, users in used.items():
            use = self.uses[name, value_name] = self.sources[name, value_name], tuple(sorted(set(users)))
            self._edges[use] += count

    def _call(
        self, caller: str, op: Op, instance: Instance, counts: Mapping[str, int],
        used: dict[str, list[tuple[int, int]]],
    ) -> None:  # fmt: skip
        callee = instance.function
        if not callee.inputs or (callee.name, callee.inputs[0].value.name) not in self.inputs:
            self._function(instance, counts)
        for item, value in zip(callee.inputs, op.operands, strict=True):
            user = self.inputs[callee.name, item.value.name], 0
            used.setdefault(value.name, []).append(user)
        for output, value in zip(callee.outputs, op.results, strict=True):
            self.sources[caller, value.name] = self.sources[callee.name, output.value.name]


def _passed_on(function: Function) -> list[object]:
    """Of each input, a key that is equal for those that lie alike in some best solution.

    They have one type, and each is but passed on, by another call, to one input of one function.
    """
    users: dict[str, list[tuple[Op, int]]] = defaultdict(list)
    for op in function.ops:
        for number, value in enumerate(op.operands):
            users[value.name].append((op, number))
    given = {output.value.name for output in function.outputs}
    keys: list[object] = []
    for item in function.inputs:
        mine = users[item.value.name]
        is_passed = len(mine) == 1 and mine[0][0].callee and item.value.name not in given
        keys.append((item.role, item.value.type, mine[0][0].callee, mine[0][1]) if is_passed else item.value.name)
    return keys


def _counts(module: Module) -> dict[str, int]:
    """How often each function runs."""
    counts: Counter[str] = Counter()

    def visit(function: Function) -> None:
        counts[function.name] += 1
        for op in function.ops:
            if op.callee:
                visit(module.function(op.callee))

    visit(module.main)
    return counts
