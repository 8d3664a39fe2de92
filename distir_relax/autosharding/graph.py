"""Strategy graph of a program: nodes that choose a strategy, and edges for the values between them.

A function has one set of nodes, however often it is called: its inputs are nodes of their own, with a layout that all
its calls share. So the graph grows with the length of the program text, not with the number of calls.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from distir_relax.autosharding.op_strategies import OpStrategy, StrategySpace
from distir_relax.autosharding.symmetry import find_symmetry
from distir_relax.ir import Function, Instance, Module, Op, RepeatedMicrobatches, TensorType, Value, callees_first
from distir_relax.layout import Partial
from distir_relax.ops import lookup
from distir_relax.sharding.factor_selection import Placed
from distir_relax.sharding.factors import is_annotation

Source = tuple[int, int]
"""A node, and the number of its result."""
User = tuple[int, int]
"""A node, and the number of its operand."""
EdgeKey = tuple[Source, tuple[User, ...]]
"""The key of an edge: the producer of a value, and its users."""
Array = npt.NDArray[Any]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, eq=False)
class Reshards:
    """The reshards of a value for one user that remain after pruning, as a matrix over numbered layouts.

    `allowed` has a row for each layout of `sources`, and a column for each of `targets`.
    """

    sources: Mapping[Placed, int]
    targets: Mapping[Placed, int]
    allowed: Array

    def submatrix(self, sources: Sequence[Placed], targets: Sequence[Placed]) -> Array:
        """Return the part of the matrix for these sources (rows) and targets (columns)."""
        matrix: Array = self.allowed[np.ix_([self.sources[s] for s in sources], [self.targets[s] for s in targets])]
        return matrix


@dataclass(frozen=True, slots=True)
class Node:
    """An op, or an input if `op` is None, with its strategies; it runs `count` times."""

    op: Op | None
    value: Value
    role: str
    strategies: tuple[OpStrategy, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A value with its producer and `users`, moved `count` times.

    Users that need the same layout share one reshard. Those `in_place` update the value, so they take it without
    reshard. If there are `reshards`, no others are allowed.
    """

    source: Source
    users: tuple[User, ...]
    count: int
    in_place: frozenset[User] = frozenset()
    reshards: Mapping[User, Reshards] | None = None

    @property
    def key(self) -> EdgeKey:
        """Return the key of the edge."""
        return self.source, self.users

    def allows_reshard(self, user: User, source: Placed, target: Placed) -> bool:
        """Return whether a user may take layout `target` of a value left in `source`; reduced sums stay reduced."""
        if self.reshards is not None and not self.reshards[user].submatrix((source,), (target,)).item():
            return False
        becomes_partial = any(isinstance(t, Partial) and s != t for s, t in zip(source, target, strict=True))
        return source == target or (user not in self.in_place and not becomes_partial)


@dataclass(slots=True)
class Graph:
    """The nodes and edges of a module of the global stage; `inlined` is its entry with calls inlined.

    `once` has the values by function that no call computes: the count of their nodes is 0.
    """

    module: Module
    space: StrategySpace
    inlined: Function
    once: Mapping[str, Collection[str]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    op_nodes: dict[tuple[str, int], int] = field(default_factory=dict)
    """By function and op number: the node of an op."""
    input_nodes: dict[tuple[str, str], int] = field(default_factory=dict)
    """By function and name: the node of an input."""
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)
    """By function and name: the producer of a value."""
    edge_keys: dict[tuple[str, str], EdgeKey] = field(default_factory=dict)
    """By function and name: the edge of a value."""
    annotations: dict[int, Op] = field(default_factory=dict)
    """The user's annotations, by their numbers in the inlined program."""
    call_counts: Mapping[str, int] = field(default_factory=dict)
    """How often each function runs, without those that never do."""
    reshards: Mapping[EdgeKey, Mapping[User, Reshards]] = field(default_factory=dict)
    """By edge: the reshards that remain after pruning."""
    _edge_counts: Counter[EdgeKey] = field(default_factory=Counter)
    _repeats: _Repeats = field(init=False)
    _node_numbers: dict[Hashable, int] = field(default_factory=dict)
    _built: set[str] = field(default_factory=set)
    _in_place: set[tuple[int, int]] = field(default_factory=set)
    _values: dict[str, Value] = field(default_factory=dict)
    _roles: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _cache: dict[Callable[[Graph], object], object] = field(default_factory=dict)

    def build(self, instance: Instance) -> None:
        """Add the entry function; `instance` maps its ops to those of the inlined program."""
        self._values = {i.value.name: i.value for i in self.inlined.inputs}
        self._values.update((v.name, v) for op in self.inlined.ops for v in op.results)
        self._repeats = _Repeats.of(self.module)
        self.call_counts = self._repeats.functions()
        self._add_function(instance)

    @property
    def edges(self) -> list[Edge]:
        """Return all edges."""
        return [
            Edge(*key, count, frozenset(self._in_place.intersection(key[1])), self.reshards.get(key))
            for key, count in self._edge_counts.items()
        ]

    def cached(self, analyze: Callable[[Graph], _Result]) -> _Result:
        """Return `analyze(self)`, computed once; the graph must be built."""
        if analyze not in self._cache:
            self._cache[analyze] = analyze(self)
        return cast(_Result, self._cache[analyze])

    def restrict(
        self, nodes: Sequence[Node], reshards: Mapping[EdgeKey, Mapping[User, Reshards]] | None = None
    ) -> Graph:
        """Return the graph with `nodes` of fewer strategies, and with fewer `reshards` if given."""
        graph = copy.copy(self)
        graph.nodes, graph._cache = list(nodes), {}
        graph.reshards = self.reshards if reshards is None else reshards
        return graph

    def in_place(self, function: str, number: int) -> bool:
        """Return whether an op updates its first operand in place, so that its result takes no memory."""
        return (self.op_nodes[function, number], 0) in self._in_place

    def type_of(self, source: Source) -> TensorType:
        """Return the type of a value."""
        node = self.nodes[source[0]]
        return (node.value if node.op is None else node.op.results[source[1]]).tensor

    def has_cost(self, node: Node) -> bool:
        """Return whether a node costs time: inputs and annotations do not."""
        return node.op is not None and not is_annotation(node.op)

    def roles(self, number: int) -> tuple[str, ...]:
        """Return the role of each operand of a node that is an input, empty for other operands."""
        roles = self._roles.get(number)
        return roles if roles is not None else ()

    def _add_function(self, instance: Instance) -> None:
        function = instance.function
        name, count = function.name, self.call_counts[function.name]
        repeats = self._repeats.value if function is self.module.main else lambda name: 1
        for target in instance.ops:
            if isinstance(target, Instance) and target.function.name not in self._built:
                self._built.add(target.function.name)
                self._add_function(target)
        keys = find_symmetry(function, self._input_key, self._output_key)
        for item, key in zip(function.inputs, keys.inputs, strict=True):
            inlined = self._values[instance.names[item.value.name]]
            strategies = tuple(OpStrategy((), (layout,), (layout,)) for layout in self.space.layouts(inlined))
            index = self._add_node((name, "input", key), None, item.value, item.role, strategies, count)
            self.input_nodes[name, item.value.name] = index
            self.sources[name, item.value.name] = index, 0
        used: dict[str, list[tuple[int, int]]] = {}
        for number, (op, target) in enumerate(zip(function.ops, instance.ops, strict=True)):
            if isinstance(target, Instance):
                self._add_call(name, op, target, used)
                continue
            producers = tuple(self.sources[name, v.name] for v in op.operands)
            strategies = self.space.strategies(target, self.inlined.ops[target])
            if is_annotation(op):
                self.annotations[target] = op
            first = op.results[0]
            runs = 0 if first.name in self.once.get(name, ()) else count * repeats(first.name)
            index = self._add_node((name, "op", keys.ops[number]), op, first, "", strategies, runs)
            self.op_nodes[name, number] = index
            self._roles[index] = tuple(self.nodes[index].role for index, _ in producers)
            for operand, value in enumerate(op.operands):
                used.setdefault(value.name, []).append((index, operand))
            for result, value in enumerate(op.results):
                self.sources[name, value.name] = index, result
        self._mark_in_place(function)
        for value_name, users in used.items():
            key = self.edge_keys[name, value_name] = self.sources[name, value_name], tuple(sorted(set(users)))
            self._edge_counts[key] += count * repeats(value_name)

    def _add_node(
        self, key: Hashable, op: Op | None, value: Value, role: str, options: tuple[OpStrategy, ...], count: int
    ) -> int:  # fmt: skip
        """Return the number of the node of an op or input: that of an equivalent one, or a new one."""
        number = self._node_numbers.setdefault((key, options), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(Node(op, value, role, options, count))
        else:
            self.nodes[number] = replace(self.nodes[number], count=self.nodes[number].count + count)
        return number

    def _input_key(self, callee: str, operand: int) -> Hashable:
        """Return the node of a function's input."""
        return self.input_nodes[callee, self.module.function(callee).inputs[operand].value.name]

    def _output_key(self, callee: str, result: int) -> Hashable:
        """Return the producer of a function's output."""
        return self.sources[callee, self.module.function(callee).outputs[result].value.name]

    def _mark_in_place(self, function: Function) -> None:
        """Record in-place updates with the annotations on their operands; an input with one has that layout at once."""
        annotation_counts = Counter(op.operands[0].name for op in function.ops if not op.callee and is_annotation(op))
        updated = {item.value.name for item in function.inputs if annotation_counts[item.value.name] == 1}
        for number in reversed(range(len(function.ops))):
            op = function.ops[number]
            if op.callee:
                continue
            is_annotated = is_annotation(op) and (op.results[0].name in updated or op.operands[0].name in updated)
            if is_annotated or lookup(op.name, op.location).updates:
                updated.add(op.operands[0].name)
                self._in_place.add((self.op_nodes[function.name, number], 0))

    def _add_call(
        self, caller: str, op: Op, instance: Instance, used: dict[str, list[tuple[int, int]]]
    ) -> None:  # fmt: skip
        callee = instance.function
        for item, value in zip(callee.inputs, op.operands, strict=True):
            user = self.input_nodes[callee.name, item.value.name], 0
            used.setdefault(value.name, []).append(user)
        for output, value in zip(callee.outputs, op.results, strict=True):
            self.sources[caller, value.name] = self.sources[callee.name, output.value.name]


@dataclass(frozen=True, slots=True)
class _Repeats:
    """How often the values of a module are computed: a repeated microbatch stands for several."""

    module: Module
    part_of: Mapping[str, int]
    stands_for: Sequence[int]

    @staticmethod
    def of(module: Module) -> _Repeats:
        repeated = next((repeated for repeated in module.records if isinstance(repeated, RepeatedMicrobatches)), None)
        if repeated is None:
            return _Repeats(module, {}, ())
        return _Repeats(module, repeated.part_of, [len(numbers) for numbers in repeated.ranges])

    def value(self, name: str) -> int:
        """Return how many of a value of the entry there are."""
        part = self.part_of.get(name, -1)
        return self.stands_for[part] if part >= 0 else 1

    def functions(self) -> dict[str, int]:
        """Return how often each function runs."""
        counts = Counter({self.module.main.name: 1})
        # Callers before the functions that they call.
        for function in reversed(callees_first(self.module)):
            for op in function.ops:
                if op.callee and counts[function.name]:
                    repeats = self.value(op.results[0].name) if function is self.module.main else 1
                    counts[op.callee] += counts[function.name] * repeats
        return counts
