"""Which dims are the same dim: the factors of all ops of a program, joined into classes.

Each op's rule says which of its dims share a factor. Read over a whole program this gives, for each dim of each value,
a list of *slots*, outermost first (a fused QKV projection's 2304 columns are ``3 12 64``: parts, heads, width), and
joins the slots that an op ties together into *classes* (the 12 heads, wherever they appear). A split belongs to a
class: it is cut once for every member, in units that all of them can bear.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from distir_relax.ir import Function, Op, TensorType, Value
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, Rule, Trait, lookup

Slot = tuple[str, int, int]
"""(value name, dim, slot index in the dim counted from the outermost)."""


@dataclass(frozen=True, slots=True)
class Atom:
    """The part of one op's factor that is one slot wherever it stands.

    `places` gives, for each operand and then each result, the (dim, slot) where it stands, or None. An atom of kind
    ``window`` ties the two dims of a sliding window, which are cut each by itself; `reach` is how many elements around
    its own a device may need.
    """

    name: str
    kind: str
    size: int
    places: tuple[tuple[int, int] | None, ...]
    reach: int = 0


class Joined:
    """Slots joined to classes; ``joined[slot]`` is the slot that stands for its class."""

    def __init__(self) -> None:
        self._next: dict[Slot, Slot] = {}

    def __getitem__(self, slot: Slot) -> Slot:
        known = self._next
        while (up := known.get(slot)) is not None:
            if (above := known.get(up)) is None:
                return up
            known[slot] = slot = above
        return slot

    def join(self, a: Slot, b: Slot) -> None:
        """Make the classes of two slots one."""
        first, second = self[a], self[b]
        if first != second:
            self._next[first] = second


@dataclass(frozen=True, slots=True)
class Factoring:
    """The slots, atoms and classes of one function."""

    slots: dict[str, tuple[tuple[int, ...], ...]]
    atoms: tuple[tuple[Atom, ...], ...]
    classes: Joined
    blocked: frozenset[Slot]

    def size(self, slot: Slot) -> int:
        """The number of units in a slot."""
        value, dim, index = slot
        return self.slots[value][dim][index]

    def around(self, slot: Slot) -> tuple[int, int]:
        """How often the slot repeats in its dim, and how many elements one unit has: (outer, inner)."""
        sizes = self.slots[slot[0]][slot[1]]
        return math.prod(sizes[: slot[2]]), math.prod(sizes[slot[2] + 1 :])

    def is_blocked(self, slot: Slot) -> bool:
        """Whether some op of the program needs the whole of the slot's class on one device."""
        return self.classes[slot] in self.blocked


def is_annotation(op: Op) -> bool:
    """Whether the op is a user's mark on a value."""
    return Trait.ANNOTATION in lookup(op.name, op.location).traits


def factorize(function: Function) -> Factoring:
    """The slots and classes of all values of `function`, a function of the global stage."""
    state = _Refinement(function)
    state.run()
    return state.result()


@dataclass(slots=True)
class _Refinement:
    function: Function
    names: list[list[str]] = field(default_factory=list)
    """Of each op, its operands and results."""
    rules: list[Rule] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    marks: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    """For dims that were looked at, the products of the inner slots: {1, …, size}; of an empty dim {1}: it has none."""
    factor_marks: list[list[set[int]]] = field(default_factory=list)
    torn: list[set[int]] = field(default_factory=list)
    """For each op, the factors whose boundaries do not nest with those of other ops: these cannot be split there."""
    users: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    fine: set[str] = field(default_factory=set)
    """The values with a boundary inside of a dim."""
    positions: dict[int, _Positions] = field(default_factory=dict)

    def run(self) -> None:
        for item in self.function.inputs:
            self._declare(item.value)
        # A model has the same few ops again and again: in each layer, and in each call of a function.
        known: dict[object, Rule] = {}
        for number, op in enumerate(self.function.ops):
            for value in op.results:
                self._declare(value)
            takes, gives = _types(op.operands), _types(op.results)
            key = (op.name, tuple(op.attrs.items()), *takes, *gives)
            if key not in known:
                known[key] = lookup(op.name, op.location).rule_for(takes, op.attrs, gives)
            rule = known[key]
            self.rules.append(rule)
            self.factor_marks.append([{1, f.size} for f in rule.factors])
            self.torn.append(set())
            names = [v.name for v in (*op.operands, *op.results)]
            self.names.append(names)
            for name in names:
                self.users[name].append(number)
            if id(rule) not in self.positions:
                self.positions[id(rule)] = _Positions.of(rule)
        # Where each dim is one factor there is nothing to carry, until a boundary comes from elsewhere.
        pending = [number for number, rule in enumerate(self.rules) if not self.positions[id(rule)].plain]
        queued = set(pending)
        while pending:
            number = pending.pop()
            queued.discard(number)
            for name in self._refine(number):
                for user in self.users[name]:
                    if user not in queued:
                        queued.add(user)
                        pending.append(user)

    def _declare(self, value: Value) -> None:
        self.shapes[value.name] = value.tensor.shape

    def _marks(self, name: str, dim: int) -> set[int]:
        found = self.marks.get((name, dim))
        if found is None:
            found = self.marks[name, dim] = {1, max(1, self.shapes[name][dim])}
        return found

    def _refine(self, number: int) -> set[str]:
        """Carry boundaries between the dims of one op; the values whose dims got new ones."""
        touched: set[str] = set()
        rule, marks, torn = self.rules[number], self.factor_marks[number], self.torn[number]
        names = self.names[number]
        changed = True
        while changed:
            changed = False
            for tensor, dim, factor, offset in self.positions[id(rule)].found:
                name = names[tensor]
                own, size = self._marks(name, dim), rule.factors[factor].size
                for mark in sorted(own) if len(own) > 2 else own:
                    if offset < mark < offset * size and mark // offset not in marks[factor]:
                        if mark % offset or not _nests(marks[factor], mark // offset):
                            torn.add(factor)
                        else:
                            marks[factor].add(mark // offset)
                            changed = True
                for mark in marks[factor]:
                    if offset * mark not in own:
                        if _nests(own, offset * mark):
                            own.add(offset * mark)
                            self.fine.add(name)
                            touched.add(name)
                            changed = True
                        else:
                            torn.add(factor)
        return touched

    def result(self) -> Factoring:
        plain: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        slots: dict[str, tuple[tuple[int, ...], ...]] = {}
        for name, shape in self.shapes.items():
            if name in self.fine:
                slots[name] = tuple(
                    tuple(a // b for a, b in pairwise(self._bounds(name, d))) for d in range(len(shape))
                )
                continue
            if shape not in plain:
                plain[shape] = tuple((n,) if n > 1 else () for n in shape)
            slots[name] = plain[shape]
        for op in filter(is_annotation, self.function.ops):
            for value in (*op.operands, *op.results):
                # What has one element or none can lie with one device, though no op can be split along it.
                sizes = zip(slots[value.name], value.tensor.shape, strict=True)
                slots[value.name] = tuple(mine or (n,) for mine, n in sizes)
        classes = Joined()
        atoms: list[tuple[Atom, ...]] = []
        blocked_slots: list[Slot] = []
        # Ops of one rule on dims cut alike have the same atoms: those of a function in all its calls.
        known: dict[object, _Atoms] = {}
        alike: dict[object, int] = {}
        cuts = {name: alike.setdefault(dims, len(alike)) for name, dims in slots.items()}
        for number, op in enumerate(self.function.ops):
            names = self.names[number]
            key = (id(self.rules[number]), frozenset(self.torn[number]), *(cuts.get(name) for name in names))
            if key not in known:
                found, alone = self._atoms(number), _held_alone(op) if is_annotation(op) else []
                known[key] = _Atoms.of([*found, *alone], self._window_atoms(number, slots), len(found))
            mine = known[key]
            for t, place, u, other in mine.ties:
                classes.join((names[t], *place), (names[u], *other))
            blocked_slots += [(names[t], *place) for t, place in mine.blocked]
            atoms.append(mine.atoms)
        return Factoring(slots, tuple(atoms), classes, frozenset(classes[slot] for slot in blocked_slots))

    def _bounds(self, name: str, dim: int) -> list[int]:
        return sorted(self._marks(name, dim), reverse=True)

    def _window_atoms(self, number: int, slots: Mapping[str, tuple[tuple[int, ...], ...]]) -> list[Atom]:
        """The windows of one op, between the outermost slots of their dims: a device's part is one block."""
        op = self.function.ops[number]
        atoms = []
        for window in self.rules[number].windows:
            places: list[tuple[int, int] | None] = [None] * (len(op.operands) + len(op.results))
            source, target = op.operands[window.operand], op.results[0]
            if min(source.tensor.shape[window.operand_dim], target.tensor.shape[window.result_dim]) > 1:
                places[window.operand] = (window.operand_dim, 0)
                places[len(op.operands)] = (window.result_dim, 0)
                name = f"window {window.index}"
                atoms.append(Atom(name, WINDOW, window.size, tuple(places), window.reach))
        return atoms

    def _atoms(self, number: int) -> list[Atom]:
        op, rule = self.function.ops[number], self.rules[number]
        tensors = [*op.operands, *op.results]
        dims = [*rule.operands, *rule.results]
        atoms: list[Atom] = []
        for index, factor in enumerate(rule.factors):
            where = []
            for t, value in enumerate(tensors):
                for dim, inside in enumerate(dims[t]):
                    if index in inside:
                        offset = math.prod(rule.factors[f].size for f in inside[inside.index(index) + 1 :])
                        where.append((t, value.name, dim, offset))
            if index in self.torn[number]:
                for t, name, dim, offset in where:
                    marks = self._bounds(name, dim)
                    for i, (high, low) in enumerate(pairwise(marks)):
                        if low < offset * factor.size and high > offset:
                            places = tuple((dim, i) if u == t else None for u in range(len(tensors)))
                            atoms.append(Atom(factor.name, BLOCKED, high // low, places))
                continue
            for high, low in pairwise(sorted(self.factor_marks[number][index], reverse=True)):
                found: dict[int, tuple[int, int]] = {}
                for t, name, dim, offset in where:
                    found[t] = (dim, self._bounds(name, dim).index(offset * high))
                atoms.append(
                    Atom(factor.name, factor.kind, high // low, tuple(found.get(t) for t in range(len(tensors))))
                )
        return atoms


@dataclass(frozen=True, slots=True)
class _Atoms:
    """The atoms of an op, the places of tensors that they tie together, and those that must be whole."""

    atoms: tuple[Atom, ...]
    ties: tuple[tuple[int, tuple[int, int], int, tuple[int, int]], ...]
    blocked: tuple[tuple[int, tuple[int, int]], ...]

    @classmethod
    def of(cls, tying: Sequence[Atom], windows: Sequence[Atom], count: int) -> _Atoms:
        """`tying` are those that join dims; of these the first `count` are the rule's."""
        ties, blocked = [], []
        for number, atom in enumerate(tying):
            members = [(t, place) for t, place in enumerate(atom.places) if place]
            ties += [(*a, *b) for a, b in pairwise(members)]
            if atom.kind == BLOCKED and number < count:
                blocked += members
        return cls((*tying, *windows), tuple(ties), tuple(blocked))


def _held_alone(op: Op) -> list[Atom]:
    """The dims of a marked value that have one element or none: it lies as its mark says."""
    dims = enumerate(op.results[0].tensor.shape)
    return [Atom(f"held {dim}", PARALLEL, size, ((dim, 0), (dim, 0))) for dim, size in dims if size <= 1]


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where the factors of a rule stand: (tensor, dim, factor, number of elements of the factors inside it).

    `plain` are rules whose dims are one factor each.
    """

    found: tuple[tuple[int, int, int, int], ...]
    plain: bool

    @classmethod
    def of(cls, rule: Rule) -> _Positions:
        found = []
        tensors = (*rule.operands, *rule.results)
        for tensor, dims in enumerate(tensors):
            for dim, inside in enumerate(dims):
                offset = 1
                for factor in reversed(inside):
                    found.append((tensor, dim, factor, offset))
                    offset *= rule.factors[factor].size
        return cls(tuple(found), all(len(inside) < 2 for dims in tensors for inside in dims))


def _nests(marks: set[int], mark: int) -> bool:
    return all(mark % m == 0 or m % mark == 0 for m in marks)


def _types(values: tuple[Value, ...]) -> list[TensorType]:
    return [v.tensor for v in values]
