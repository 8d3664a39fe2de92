"""Division of dims into slots at boundaries, which are propagated from op to op.

The boundaries of a dim are the products of its inner slots' sizes. Reshapes introduce them, and every dim that ops tie
to such a dim gets them too. Dims that are each a single factor of an op have the same boundaries, so these are joined
first, and only ops with several factors in one dim are iterated (`JoinedBoundaries`). If boundaries are not nested,
some op on the way must give up a factor, depending on the path; then they are propagated op by op
(`PropagatedBoundaries`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from distir_relax.ir import Function, TensorType, Value
from distir_relax.ops import Rule, lookup

NONE: frozenset[int] = frozenset()


@dataclass(slots=True)
class Rules:
    """The ops of a function: operand and result names, rules, and positions of factors in the rules.

    Sizes are generic values of symbolic ones.
    """

    function: Function
    names: list[list[str]] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    positions: dict[int, Positions] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(function: Function) -> Rules:
        """Look up the rule of each op."""
        result = Rules(function)
        result.shapes.update((item.value.name, item.value.tensor.generic.shape) for item in function.inputs)
        # Cached by types: a model repeats the same few ops in each layer and each call of a function.
        rules: dict[object, Rule] = {}
        rules_by_type: dict[object, Rule] = {}
        for op in function.ops:
            values = (*op.operands, *op.results)
            type_key = (op.name, id(op.attrs), *[id(v.type) for v in values])
            rule = rules_by_type.get(type_key)
            if rule is None:
                operand_types, result_types = _types(op.operands), _types(op.results)
                key = (op.name, tuple(op.attrs.items()), *operand_types, *result_types)
                if key not in rules:
                    rules[key] = lookup(op.name, op.location).rule_for(operand_types, op.attrs, result_types)
                    result.positions.setdefault(id(rules[key]), Positions.of(rules[key]))
                rule = rules_by_type[type_key] = rules[key]
            result.rules.append(rule)
            result.names.append([v.name for v in values])
            for value in op.results:
                result.shapes[value.name] = value.tensor.generic.shape
        return result


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
    _first_dims: dict[str, int] = field(default_factory=dict)
    """The index of each value's first dim."""
    _parents: list[int] = field(default_factory=list)
    _boundaries: dict[int, set[int]] = field(default_factory=dict)
    """Boundaries by the representative of joined dims."""
    _factor_boundaries: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Boundaries of factors that are not a dim by themselves, by op and factor."""

    def run(self) -> bool:
        """Compute the boundaries; return whether all of them are nested."""
        self._join()
        ties = [self._ties(n) for n, rule in enumerate(self.rules.rules) if self.rules.positions[id(rule)].shared]
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
        split_values = {root for root, marks in self._boundaries.items() if len(marks) > 2}
        for name, first in self._first_dims.items() if split_values else ():
            if any(self._root(first + dim) in split_values for dim in range(len(self.rules.shapes[name]))):
                self.split_values.add(name)
        return True

    def dim_boundaries(self, name: str, dim: int) -> set[int]:
        """Return the boundaries of a dim: {1, ..., size}; {1} if it is empty."""
        root = self._root(self._first_dims[name] + dim)
        if root not in self._boundaries:
            self._boundaries[root] = {1, max(1, self.rules.shapes[name][dim])}
        return self._boundaries[root]

    def factor_boundaries(self, number: int, factor: int) -> set[int]:
        """Return the boundaries of a factor of the op of this number."""
        rule = self.rules.rules[number]
        positions = self.rules.positions[id(rule)].alone.get(factor)
        if positions:
            return self.dim_boundaries(self.rules.names[number][positions[0][0]], positions[0][1])
        return self._factor_boundaries.setdefault((number, factor), {1, rule.factors[factor].size})

    def conflicts(self, number: int) -> frozenset[int]:
        """Return the factors that cannot be split at an op: none here."""
        return NONE

    def _join(self) -> None:
        count = 0
        for name, shape in self.rules.shapes.items():
            self._first_dims[name] = count
            count += len(shape)
        self._parents = parents = list(range(count))
        first, root, positions = self._first_dims, self._root, self.rules.positions
        for names, rule in zip(self.rules.names, self.rules.rules, strict=True):
            for dims in positions[id(rule)].alone.values():
                if len(dims) > 1:
                    tensor, dim = dims[0]
                    representative = root(first[names[tensor]] + dim)
                    for tensor, dim in dims[1:]:
                        parents[root(first[names[tensor]] + dim)] = representative

    def _root(self, dim: int) -> int:
        parents = self._parents
        while (parent := parents[dim]) != dim:
            parents[dim] = dim = parents[parent]
        return dim

    def _ties(self, number: int) -> list[tuple[set[int], set[int], int, int]]:
        """Return an op's (boundaries of dim, boundaries of factor in it, elements inside the factor, factor size)."""
        rule, names = self.rules.rules[number], self.rules.names[number]
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
        for number, (names, rule) in enumerate(zip(self.rules.names, self.rules.rules, strict=True)):
            self._factor_boundaries.append([{1, f.size} for f in rule.factors])
            self._conflicts.append(set())
            for name in names:
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

    def _refine(self, number: int) -> set[str]:
        """Propagate boundaries between the dims of one op; return the values whose dims changed."""
        changed_values: set[str] = set()
        rule, factors, conflicts = self.rules.rules[number], self._factor_boundaries[number], self._conflicts[number]
        names = self.rules.names[number]
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


def _types(values: tuple[Value, ...]) -> list[TensorType]:
    return [v.tensor for v in values]
