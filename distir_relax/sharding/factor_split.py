"""Division of dims into slots at boundaries, which are propagated from op to op.

The boundaries of a dim are the products of its inner slots' sizes. Reshapes introduce them, and every dim that ops tie
to such a dim gets them too. Dims that are each a single factor of an op have the same boundaries, so these are joined
first, and only ops with several factors in one dim are iterated (`JoinedBoundaries`). If boundaries are not nested,
some op on the way must give up a factor, depending on the path; then they are propagated op by op
(`PropagatedBoundaries`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from distir_relax.ir import Function, Instance, Op, TensorType, Value
from distir_relax.ops import Rule, lookup
from distir_relax.sharding.components import IntArray, components, equal_rows

NONE: frozenset[int] = frozenset()

Dims = tuple[tuple[int, ...], ...]
"""The sizes of the slots of each dim of a value."""


@dataclass(frozen=True, slots=True)
class OpGroup:
    """The ops of one rule: their numbers in ascending order, and the numbers of their tensors, one row for each op."""

    rule: Rule
    numbers: list[int]
    tensors: IntArray


@dataclass(frozen=True, slots=True)
class Body:
    """A function in an inlined program: the numbers of its values, and of its ops but calls, a row for each call of it.

    Values are in the order of `Instance.names`.
    """

    values: IntArray
    numbers: IntArray


@dataclass(slots=True)
class Rules:
    """The rules of a function's ops, and the positions of factors in the rules.

    Sizes are generic values of symbolic ones. Values are numbered in the order of `shapes`.
    """

    function: Function
    rules: list[Rule]
    positions: dict[int, Positions] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[str, int] = field(init=False)
    """The number of each value."""
    groups: list[OpGroup] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    """The functions of the program, in the order of `list_instances`."""

    @staticmethod
    def of(function: Function, instance: Instance | None = None) -> Rules:
        """Look up the rule of each op; `instance` is the tree of calls that an inlined function has its ops from.

        Ops of all calls of one function are looked up, and their operands numbered, at once.
        """
        result = Rules(function, [_NO_RULE] * len(function.ops))
        values = [item.value for item in function.inputs] + [v for op in function.ops for v in op.results]
        types = {id(value.type): value for value in values}
        shapes = {key: value.tensor.generic.shape for key, value in types.items()}
        result.shapes = {value.name: shapes[id(value.type)] for value in values}
        result.numbers = {name: number for number, name in enumerate(result.shapes)}
        table = _RuleTable()
        members: dict[int, list[tuple[IntArray, IntArray]]] = defaultdict(list)
        for equal in list_instances(instance or _whole(function)):
            for rule, numbers, tensors in result._group(equal, table):
                members[id(rule)].append((numbers, tensors))
        for key, parts in members.items():
            numbers, tensors = (np.concatenate(part) for part in zip(*parts, strict=True))
            order = np.argsort(numbers)
            result.groups.append(OpGroup(table.by_id[key], numbers[order].tolist(), tensors[order]))
        result.positions = {id(group.rule): Positions.of(group.rule) for group in result.groups}
        for group in result.groups:
            for number in group.numbers:
                result.rules[number] = group.rule
        return result

    def names(self, number: int) -> list[str]:
        """Return the names of the operands and results of the op of this number."""
        op = self.function.ops[number]
        return [v.name for v in (*op.operands, *op.results)]

    def _group(self, instances: Sequence[Instance], table: _RuleTable) -> Iterator[tuple[Rule, IntArray, IntArray]]:
        """Yield each rule of a function with the ops of it in all instances, and their tensors."""
        ops = [(place, op) for place, op in enumerate(instances[0].function.ops) if not op.callee]
        names = {name: index for index, name in enumerate(instances[0].names)}
        number_of = self.numbers.__getitem__
        values = np.array([list(map(number_of, i.names.values())) for i in instances], dtype=np.int64)
        numbers = np.array([[i.ops[place] for place, _ in ops] for i in instances], dtype=np.int64)
        self.bodies.append(Body(values, numbers))
        by_rule: dict[int, list[int]] = defaultdict(list)
        tensors = [[names[v.name] for v in (*op.operands, *op.results)] for _, op in ops]
        for index, (_, op) in enumerate(ops):
            by_rule[id(table.rule_of(op))].append(index)
        for key, indices in by_rule.items():
            columns = np.array([tensors[index] for index in indices], dtype=np.int64)
            rows = values[:, columns].reshape(-1, columns.shape[1])
            yield table.by_id[key], numbers[:, indices].reshape(-1), rows


_NO_RULE = Rule((), (), ())


def _whole(function: Function) -> Instance:
    """Return a function without calls as an instance of itself."""
    names = [i.value.name for i in function.inputs] + [v.name for op in function.ops for v in op.results]
    return Instance(function, dict(zip(names, names, strict=True)), tuple(range(len(function.ops))))


@dataclass(slots=True)
class _RuleTable:
    """Rules of ops, looked up once for ops of equal attributes and types."""

    by_id: dict[int, Rule] = field(default_factory=dict)
    _by_key: dict[object, Rule] = field(default_factory=dict)
    _by_type_ids: dict[object, Rule] = field(default_factory=dict)

    def rule_of(self, op: Op) -> Rule:
        ids = (op.name, id(op.attrs), *[id(v.type) for v in (*op.operands, *op.results)])
        rule = self._by_type_ids.get(ids)
        if rule is None:
            operands, results = _types(op.operands), _types(op.results)
            key = (op.name, tuple(op.attrs.items()), *operands, *results)
            rule = self._by_key.get(key)
            if rule is None:
                rule = self._by_key[key] = lookup(op.name, op.location).rule_for(operands, op.attrs, results)
                self.by_id[id(rule)] = rule
            self._by_type_ids[ids] = rule
        return rule


def list_instances(instance: Instance) -> list[list[Instance]]:
    """Return an instance and those of all calls in it, callers first, in one list for each function."""
    found: dict[int, list[Instance]] = defaultdict(list)
    _add_instances(instance, found)
    return list(found.values())


def _add_instances(instance: Instance, found: dict[int, list[Instance]]) -> None:
    found[id(instance.function)].append(instance)
    for inner in instance.ops:
        if isinstance(inner, Instance):
            _add_instances(inner, found)


def find_boundaries(rules: Rules) -> JoinedBoundaries | PropagatedBoundaries:
    """Return the boundaries of all dims and factors."""
    joined = JoinedBoundaries(rules)
    return joined if joined.run() else PropagatedBoundaries(rules).run()


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of the factors of a rule: (tensor, dim, factor, number of elements of the factors inside it).

    `shared` are those in dims of several factors. `alone` maps each factor to the dims that have only this factor.
    """

    all: tuple[tuple[int, int, int, int], ...]
    shared: tuple[tuple[int, int, int, int], ...]
    alone: dict[int, tuple[tuple[int, int], ...]]

    @staticmethod
    def of(rule: Rule) -> Positions:
        """Return the positions of a rule's factors."""
        all, shared = [], []
        alone: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for tensor, dims in enumerate((*rule.operands, *rule.results)):
            for dim, factors in enumerate(dims):
                offset = 1
                for factor in reversed(factors):
                    all.append((tensor, dim, factor, offset))
                    offset *= rule.factors[factor].size
                if len(factors) == 1:
                    alone[factors[0]].append((tensor, dim))
                else:
                    shared += all[len(all) - len(factors) :]
        return Positions(tuple(all), tuple(shared), {factor: tuple(positions) for factor, positions in alone.items()})


@dataclass(slots=True)
class JoinedBoundaries:
    """Boundaries that are all nested: of dims joined through ops, propagated by ops with several factors in one dim."""

    rules: Rules
    split_values: set[str] = field(default_factory=set)
    """The values with a boundary inside of a dim."""
    _first_dims: IntArray = field(init=False)
    """The index of each value's first dim."""
    _roots: IntArray = field(init=False)
    """The representative of the dims joined with each dim."""
    _root_of: list[int] = field(init=False)
    """`_roots` as a list, for lookups of one dim."""
    _first_dim_of: dict[str, int] = field(init=False)
    _boundaries: dict[int, set[int]] = field(default_factory=dict)
    """Boundaries by the representative of joined dims."""
    _factor_boundaries: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Boundaries of factors that are not a dim by themselves, by op and factor."""
    _equal: dict[int, int] = field(default_factory=dict)
    """For an op with several factors in one dim, the first of the same rule on dims joined with its own."""

    def run(self) -> bool:
        """Compute the boundaries; return whether all of them are nested."""
        self._join()
        ties = [self._ties(number) for number in self._distinct()]
        users: dict[int, list[int]] = defaultdict(list)
        for index, op_ties in enumerate(ties):
            for boundaries, factor, _, _ in op_ties:
                users[id(boundaries)].append(index)
                users[id(factor)].append(index)
        pending = list(range(len(ties)))
        queued = set(pending)
        while pending:
            index = pending.pop()
            queued.discard(index)
            changed = _propagate(ties[index])
            if changed is None:
                return False
            affected = {user for key in changed for user in users[key]} - queued
            queued |= affected
            pending += sorted(affected)
        split_roots = [root for root, marks in self._boundaries.items() if len(marks) > 2]
        if split_roots:
            is_split = np.zeros(len(self._roots), dtype=bool)
            is_split[split_roots] = True
            dims = np.flatnonzero(is_split[self._roots])
            # Values without dims have the index of the next value's first dim.
            values = np.unique(np.searchsorted(self._first_dims, dims, "right") - 1)
            names = list(self.rules.shapes)
            self.split_values.update(names[number] for number in values.tolist())
        return True

    def dim_boundaries(self, name: str, dim: int) -> set[int]:
        """Return the boundaries of a dim: {1, ..., size}; {1} if it is empty."""
        root = self._root_of[self._first_dim_of[name] + dim]
        if root not in self._boundaries:
            self._boundaries[root] = {1, max(1, self.rules.shapes[name][dim])}
        return self._boundaries[root]

    def factor_boundaries(self, number: int, factor: int) -> set[int]:
        """Return the boundaries of a factor of the op of this number."""
        rule = self.rules.rules[number]
        positions = self.rules.positions[id(rule)].alone.get(factor)
        if positions:
            return self.dim_boundaries(self.rules.names(number)[positions[0][0]], positions[0][1])
        first = self._equal.get(number, number)
        return self._factor_boundaries.setdefault((first, factor), {1, rule.factors[factor].size})

    def conflicts(self, number: int) -> frozenset[int]:
        """Return the factors that cannot be split at an op: none here."""
        return NONE

    def slots(self) -> dict[str, Dims]:
        """Return the slots of the dims of all values."""
        divisions: dict[tuple[int, ...], int] = {}
        division_of = np.full(len(self._roots) + 1, -1, dtype=np.int64)
        for root, marks in self._boundaries.items():
            if len(marks) > 2:
                division_of[root] = divisions.setdefault(tuple(sorted(marks, reverse=True)), len(divisions))
        division = division_of[self._roots].tolist()
        divided, cache = list(divisions), dict[tuple[tuple[int, ...], tuple[int, ...]], Dims]()
        result = {}
        for (name, shape), first in zip(self.rules.shapes.items(), self._first_dims.tolist(), strict=True):
            key = shape, tuple(division[first : first + len(shape)])
            dims = cache.get(key)
            if dims is None:
                pairs = zip(*key, strict=True)
                dims = cache[key] = tuple(_divide(divided[d]) if d >= 0 else _undivided(n) for n, d in pairs)
            result[name] = dims
        return result

    def _join(self) -> None:
        """Join dims that are each a single factor of an op, and have that in common."""
        counts = [len(shape) for shape in self.rules.shapes.values()]
        self._first_dims = np.cumsum([0, *counts])[:-1]
        edges = []
        for group in self.rules.groups:
            for dims in self.rules.positions[id(group.rule)].alone.values():
                first = self._dims(group, *dims[0])
                edges += [(first, self._dims(group, *other)) for other in dims[1:]]
        self._roots = components(sum(counts), edges)
        self._root_of = self._roots.tolist()
        self._first_dim_of = dict(zip(self.rules.shapes, self._first_dims.tolist(), strict=True))

    def _dims(self, group: OpGroup, tensor: int, dim: int) -> IntArray:
        """Return the indices of a dim of a tensor of each op of a group."""
        return self._first_dims[group.tensors[:, tensor]] + dim

    def _distinct(self) -> list[int]:
        """Return the ops with several factors in one dim, but one of those of a rule on joined dims."""
        result = []
        for group in self.rules.groups:
            positions = self.rules.positions[id(group.rule)]
            if not positions.shared:
                continue
            factors = {factor for _, _, factor, _ in positions.shared}
            dims = [(tensor, dim) for tensor, dim, _, _ in positions.shared]
            dims += [positions.alone[factor][0] for factor in sorted(factors) if factor in positions.alone]
            columns = [self._roots[self._dims(group, *dim)] for dim in dict.fromkeys(dims)]
            for rows in equal_rows(np.column_stack(columns)):
                members = [group.numbers[row] for row in rows.tolist()]
                self._equal.update(dict.fromkeys(members, members[0]))
                result.append(members[0])
        return result

    def _ties(self, number: int) -> list[tuple[set[int], set[int], int, int]]:
        """Return an op's (boundaries of dim, boundaries of factor in it, elements inside the factor, factor size)."""
        rule, names = self.rules.rules[number], self.rules.names(number)
        return [
            (
                self.dim_boundaries(names[tensor], dim),
                self.factor_boundaries(number, factor),
                offset,
                rule.factors[factor].size,
            )
            for tensor, dim, factor, offset in self.rules.positions[id(rule)].shared
        ]


def _propagate(ties: Sequence[tuple[set[int], set[int], int, int]]) -> set[int] | None:
    """Propagate boundaries between dims and factors of one op; return ids of changed sets, None for a conflict."""
    changed: set[int] = set()
    repeat = True
    while repeat:
        before = len(changed), sum(len(dim) + len(factor) for dim, factor, _, _ in ties)
        for dim, factor, offset, size in ties:
            for boundary in tuple(dim):
                if offset < boundary < offset * size and boundary // offset not in factor:
                    if boundary % offset or not is_nested(factor, boundary // offset):
                        return None
                    factor.add(boundary // offset)
                    changed.add(id(factor))
            for boundary in tuple(factor):
                if offset * boundary not in dim:
                    if not is_nested(dim, offset * boundary):
                        return None
                    dim.add(offset * boundary)
                    changed.add(id(dim))
        repeat = before != (len(changed), sum(len(dim) + len(factor) for dim, factor, _, _ in ties))
    return changed


@dataclass(slots=True)
class PropagatedBoundaries:
    """Boundaries propagated op by op, last reached first; where they are not nested, the op gives a factor up."""

    rules: Rules
    split_values: set[str] = field(default_factory=set)
    _boundaries: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    _factor_boundaries: list[list[set[int]]] = field(default_factory=list)
    _conflicts: list[set[int]] = field(default_factory=list)

    def run(self) -> PropagatedBoundaries:
        """Compute the boundaries."""
        users: dict[str, list[int]] = defaultdict(list)
        for number, rule in enumerate(self.rules.rules):
            self._factor_boundaries.append([{1, f.size} for f in rule.factors])
            self._conflicts.append(set())
            for name in self.rules.names(number):
                users[name].append(number)
        # Where each dim is one factor there is nothing to propagate, until a boundary comes from elsewhere.
        pending = [n for n, rule in enumerate(self.rules.rules) if self.rules.positions[id(rule)].shared]
        queued = set(pending)
        while pending:
            number = pending.pop()
            queued.discard(number)
            for name in self._refine(number):
                for user in users[name]:
                    if user not in queued:
                        queued.add(user)
                        pending.append(user)
        return self

    def dim_boundaries(self, name: str, dim: int) -> set[int]:
        """As `JoinedBoundaries.dim_boundaries`."""
        boundaries = self._boundaries.get((name, dim))
        if boundaries is None:
            boundaries = self._boundaries[name, dim] = {1, max(1, self.rules.shapes[name][dim])}
        return boundaries

    def factor_boundaries(self, number: int, factor: int) -> set[int]:
        """As `JoinedBoundaries.factor_boundaries`."""
        return self._factor_boundaries[number][factor]

    def conflicts(self, number: int) -> frozenset[int]:
        """Return the factors of an op that cannot be split there: their boundaries are not nested in other ops'."""
        return frozenset(self._conflicts[number])

    def slots(self) -> dict[str, Dims]:
        """As `JoinedBoundaries.slots`."""
        result = {}
        for name, shape in self.rules.shapes.items():
            marks = [sorted(self.dim_boundaries(name, dim), reverse=True) for dim in range(len(shape))]
            result[name] = tuple(map(_divide, marks))
        return result

    def _refine(self, number: int) -> set[str]:
        """Propagate boundaries between the dims of one op; return the values whose dims changed."""
        changed_values: set[str] = set()
        rule, factors, conflicts = self.rules.rules[number], self._factor_boundaries[number], self._conflicts[number]
        names = self.rules.names(number)
        changed = True
        while changed:
            changed = False
            for tensor, dim, factor, offset in self.rules.positions[id(rule)].all:
                name = names[tensor]
                bounds, size = self.dim_boundaries(name, dim), rule.factors[factor].size
                for boundary in sorted(bounds) if len(bounds) > 2 else bounds:
                    if offset < boundary < offset * size and boundary // offset not in factors[factor]:
                        if boundary % offset or not is_nested(factors[factor], boundary // offset):
                            conflicts.add(factor)
                        else:
                            factors[factor].add(boundary // offset)
                            changed = True
                for boundary in factors[factor]:
                    if offset * boundary not in bounds:
                        if is_nested(bounds, offset * boundary):
                            bounds.add(offset * boundary)
                            self.split_values.add(name)
                            changed_values.add(name)
                            changed = True
                        else:
                            conflicts.add(factor)
        return changed_values


def is_nested(boundaries: set[int], boundary: int) -> bool:
    """Whether a boundary divides, or is divided by, each of the others."""
    return all(boundary % other == 0 or other % boundary == 0 for other in boundaries)


def _divide(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the slots between boundaries, the largest first."""
    return tuple(a // b for a, b in pairwise(boundaries))


def _undivided(size: int) -> tuple[int, ...]:
    return (size,) if size > 1 else ()


def _types(values: tuple[Value, ...]) -> list[TensorType]:
    return [v.tensor for v in values]
