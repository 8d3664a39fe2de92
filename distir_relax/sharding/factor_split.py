"""Where the dims of a program's values are to be divided into slots: boundaries, carried from op to op.

The boundaries of a dim are the products of its inner slots. A reshape gives some, and every dim that an op ties to
that one gets them too. Dims that are one factor of an op each have the same boundaries, so they are joined first, and
only ops with several factors in one dim are gone through (`Joint`). Where boundaries do not nest, an op on the way has
to give up the factor; which one depends on the way, so there they are carried op by op (`Carried`).
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
    """The ops of a function: the names of the operands and results of each, its rule, where factors stand in it."""

    function: Function
    names: list[list[str]] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    positions: dict[int, Positions] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(function: Function) -> Rules:
        """Look up the rule of each op."""
        found = Rules(function)
        found.shapes.update((item.value.name, item.value.tensor.shape) for item in function.inputs)
        # A model has the same few ops again and again: in each layer, and in each call of a function.
        known: dict[object, Rule] = {}
        seen: dict[object, Rule] = {}
        for op in function.ops:
            values = (*op.operands, *op.results)
            mine = (op.name, id(op.attrs), *[id(v.type) for v in values])
            rule = seen.get(mine)
            if rule is None:
                takes, gives = _types(op.operands), _types(op.results)
                key = (op.name, tuple(op.attrs.items()), *takes, *gives)
                if key not in known:
                    known[key] = lookup(op.name, op.location).rule_for(takes, op.attrs, gives)
                    found.positions.setdefault(id(known[key]), Positions.of(known[key]))
                rule = seen[mine] = known[key]
            found.rules.append(rule)
            found.names.append([v.name for v in values])
            for value in op.results:
                found.shapes[value.name] = value.tensor.shape
        return found


def boundaries_of(rules: Rules) -> Joint | Carried:
    """The boundaries of all dims and factors."""
    joint = Joint(rules)
    return joint if joint.run() else Carried(rules).run()


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the factors of a rule stand: (tensor, dim, factor, number of elements of the factors inside it).

    `shared` are those in dims of several factors. `alone` has for each factor the dims that it is by itself.
    """

    found: tuple[tuple[int, int, int, int], ...]
    shared: tuple[tuple[int, int, int, int], ...]
    alone: dict[int, tuple[tuple[int, int], ...]]

    @staticmethod
    def of(rule: Rule) -> Positions:
        """Those of a rule."""
        found, shared = [], []
        alone: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for tensor, dims in enumerate((*rule.operands, *rule.results)):
            for dim, inside in enumerate(dims):
                offset = 1
                for factor in reversed(inside):
                    found.append((tensor, dim, factor, offset))
                    offset *= rule.factors[factor].size
                if len(inside) == 1:
                    alone[inside[0]].append((tensor, dim))
                else:
                    shared += found[len(found) - len(inside) :]
        return Positions(tuple(found), tuple(shared), {factor: tuple(where) for factor, where in alone.items()})


@dataclass(slots=True)
class Joint:
    """Boundaries that all nest: of dims joined through ops, carried by the ops with several factors in one dim."""

    rules: Rules
    fine: set[str] = field(default_factory=set)
    """The values with a boundary inside of a dim."""
    _first: dict[str, int] = field(default_factory=dict)
    """The number of each value's first dim."""
    _above: list[int] = field(default_factory=list)
    _marks: dict[int, set[int]] = field(default_factory=dict)
    """Boundaries by the dim that stands for those that are joined."""
    _own: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Those of the factors, by op and factor, that are no dim by themselves."""

    def run(self) -> bool:
        """Find the boundaries; whether all of them nest."""
        self._join()
        works = [self._work(n) for n, rule in enumerate(self.rules.rules) if self.rules.positions[id(rule)].shared]
        users: dict[int, list[int]] = defaultdict(list)
        for place, work in enumerate(works):
            for own, factor, _, _ in work:
                users[id(own)].append(place)
                users[id(factor)].append(place)
        pending = list(range(len(works)))
        queued = set(pending)
        while pending:
            place = pending.pop()
            queued.discard(place)
            changed = _carry(works[place])
            if changed is None:
                return False
            again = {user for marks in changed for user in users[marks]} - queued
            queued |= again
            pending += sorted(again)
        fine = {root for root, marks in self._marks.items() if len(marks) > 2}
        for name, first in self._first.items() if fine else ():
            if any(self._root(first + dim) in fine for dim in range(len(self.rules.shapes[name]))):
                self.fine.add(name)
        return True

    def of_dim(self, name: str, dim: int) -> set[int]:
        """The boundaries of a dim: {1, …, size}; of an empty one {1}."""
        root = self._root(self._first[name] + dim)
        if root not in self._marks:
            self._marks[root] = {1, max(1, self.rules.shapes[name][dim])}
        return self._marks[root]

    def of_factor(self, number: int, factor: int) -> set[int]:
        """The boundaries of a factor of the op of this number."""
        rule = self.rules.rules[number]
        where = self.rules.positions[id(rule)].alone.get(factor)
        if where:
            return self.of_dim(self.rules.names[number][where[0][0]], where[0][1])
        return self._own.setdefault((number, factor), {1, rule.factors[factor].size})

    def torn(self, number: int) -> frozenset[int]:
        """The factors of an op that cannot be split there: none."""
        return NONE

    def _join(self) -> None:
        count = 0
        for name, shape in self.rules.shapes.items():
            self._first[name] = count
            count += len(shape)
        self._above = above = list(range(count))
        first, root, positions = self._first, self._root, self.rules.positions
        for names, rule in zip(self.rules.names, self.rules.rules, strict=True):
            for where in positions[id(rule)].alone.values():
                if len(where) > 1:
                    tensor, dim = where[0]
                    stands = root(first[names[tensor]] + dim)
                    for tensor, dim in where[1:]:
                        above[root(first[names[tensor]] + dim)] = stands

    def _root(self, dim: int) -> int:
        above = self._above
        while (up := above[dim]) != dim:
            above[dim] = dim = above[up]
        return dim

    def _work(self, number: int) -> list[tuple[set[int], set[int], int, int]]:
        """What an op ties: boundaries of a dim and of a factor in it, elements inside of the factor, and its size."""
        rule, names = self.rules.rules[number], self.rules.names[number]
        return [
            (self.of_dim(names[tensor], dim), self.of_factor(number, factor), offset, rule.factors[factor].size)
            for tensor, dim, factor, offset in self.rules.positions[id(rule)].shared
        ]


def _carry(work: Sequence[tuple[set[int], set[int], int, int]]) -> set[int] | None:
    """Carry boundaries between the dims and factors of one op; the ids of those that changed, None for a conflict."""
    changed: set[int] = set()
    again = True
    while again:
        before = len(changed), sum(len(own) + len(factor) for own, factor, _, _ in work)
        for own, factor, offset, size in work:
            for mark in tuple(own):
                if offset < mark < offset * size and mark // offset not in factor:
                    if mark % offset or not nests(factor, mark // offset):
                        return None
                    factor.add(mark // offset)
                    changed.add(id(factor))
            for mark in tuple(factor):
                if offset * mark not in own:
                    if not nests(own, offset * mark):
                        return None
                    own.add(offset * mark)
                    changed.add(id(own))
        again = before != (len(changed), sum(len(own) + len(factor) for own, factor, _, _ in work))
    return changed


@dataclass(slots=True)
class Carried:
    """Boundaries carried op by op, the last that was reached first; where they do not nest an op gives a factor up."""

    rules: Rules
    fine: set[str] = field(default_factory=set)
    _marks: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    _factor_marks: list[list[set[int]]] = field(default_factory=list)
    _torn: list[set[int]] = field(default_factory=list)

    def run(self) -> Carried:
        """Find the boundaries."""
        users: dict[str, list[int]] = defaultdict(list)
        for number, (names, rule) in enumerate(zip(self.rules.names, self.rules.rules, strict=True)):
            self._factor_marks.append([{1, f.size} for f in rule.factors])
            self._torn.append(set())
            for name in names:
                users[name].append(number)
        # Where each dim is one factor there is nothing to carry, until a boundary comes from elsewhere.
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

    def of_dim(self, name: str, dim: int) -> set[int]:
        """As `Joint.of_dim`."""
        found = self._marks.get((name, dim))
        if found is None:
            found = self._marks[name, dim] = {1, max(1, self.rules.shapes[name][dim])}
        return found

    def of_factor(self, number: int, factor: int) -> set[int]:
        """As `Joint.of_factor`."""
        return self._factor_marks[number][factor]

    def torn(self, number: int) -> frozenset[int]:
        """The factors of an op whose boundaries do not nest with those of other ops: they cannot be split there."""
        return frozenset(self._torn[number])

    def _refine(self, number: int) -> set[str]:
        """Carry boundaries between the dims of one op; the values whose dims got new ones."""
        touched: set[str] = set()
        rule, marks, torn = self.rules.rules[number], self._factor_marks[number], self._torn[number]
        names = self.rules.names[number]
        changed = True
        while changed:
            changed = False
            for tensor, dim, factor, offset in self.rules.positions[id(rule)].found:
                name = names[tensor]
                own, size = self.of_dim(name, dim), rule.factors[factor].size
                for mark in sorted(own) if len(own) > 2 else own:
                    if offset < mark < offset * size and mark // offset not in marks[factor]:
                        if mark % offset or not nests(marks[factor], mark // offset):
                            torn.add(factor)
                        else:
                            marks[factor].add(mark // offset)
                            changed = True
                for mark in marks[factor]:
                    if offset * mark not in own:
                        if nests(own, offset * mark):
                            own.add(offset * mark)
                            self.fine.add(name)
                            touched.add(name)
                            changed = True
                        else:
                            torn.add(factor)
        return touched


def nests(marks: set[int], mark: int) -> bool:
    """Whether a boundary divides, or is divided by, each of others."""
    return all(mark % m == 0 or m % mark == 0 for m in marks)


def _types(values: tuple[Value, ...]) -> list[TensorType]:
    return [v.tensor for v in values]
