"""Which dims are the same dim: the factors of all ops of a program, joined into classes.

Each op's rule says which of its dims share a factor. Read over a whole program this gives, for each dim of each value,
a list of *slots*, outermost first (a fused QKV projection's 2304 columns are ``3 12 64``: parts, heads, width), and
joins the slots that an op ties together into *classes* (the 12 heads, wherever they appear). A split belongs to a
class: it is cut once for every member, in units that all of them can bear.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from distir_relax.ir import Function, Module, Op, lately, whole_of
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, Trait, lookup
from distir_relax.sharding.factor_split import Carried, Joint, Rules, boundaries_of

Slot = tuple[str, int, int]
"""(value name, dim, slot index in the dim counted from the outermost)."""

Dims = tuple[tuple[int, ...], ...]
"""The sizes of the slots of each dim of a value."""


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
    """The slots of values joined to classes; ``joined[slot]`` is the slot that stands for its class."""

    def __init__(self, slots: Mapping[str, Dims]) -> None:
        self._slots = slots
        self.first: dict[str, int] = {}
        """The number of the first slot of each value: they are numbered in turn."""
        count = 0
        for name, dims in slots.items():
            self.first[name] = count
            count += sum(map(len, dims))
        self._above = list(range(count))
        self._names, self._firsts = list(self.first), list(self.first.values())
        self._known: dict[int, Slot] = {}

    def __getitem__(self, slot: Slot) -> Slot:
        name, dim, index = slot
        return self.standing(self.first[name] + place_in(self._slots[name], dim, index))

    def standing(self, number: int) -> Slot:
        """The slot that stands for the class of a slot, by its number."""
        root = self._root(number)
        if root not in self._known:
            # Values without slots have the number of the next.
            value = bisect_right(self._firsts, root) - 1
            dims, index = self._slots[self._names[value]], root - self._firsts[value]
            dim = 0
            while index >= len(dims[dim]):
                index -= len(dims[dim])
                dim += 1
            self._known[root] = self._names[value], dim, index
        return self._known[root]

    def join(self, a: int, b: int) -> None:
        """Make the classes of two slots one, by their numbers. Nothing must have been looked up."""
        first, second = self._root(a), self._root(b)
        if first != second:
            self._above[first] = second

    def _root(self, number: int) -> int:
        above = self._above
        while (up := above[number]) != number:
            above[number] = number = above[up]
        return number


def place_in(dims: Dims, dim: int, index: int) -> int:
    """The number of a slot among those of its value."""
    return index if dim == 0 else index + sum(map(len, dims[:dim]))


@dataclass(frozen=True, slots=True)
class Factoring:
    """The slots, atoms and classes of one function."""

    slots: dict[str, Dims]
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

    def without_windows(self) -> Factoring:
        """The factoring under which no op is split along the dims of a sliding window."""
        if not any(atom.kind == WINDOW for atoms in self.atoms for atom in atoms):
            return self
        atoms = tuple(tuple(atom for atom in atoms if atom.kind != WINDOW) for atoms in self.atoms)
        return Factoring(self.slots, atoms, self.classes, self.blocked)

    def is_blocked(self, slot: Slot) -> bool:
        """Whether some op of the program needs the whole of the slot's class on one device."""
        return self.classes[slot] in self.blocked


def is_annotation(op: Op) -> bool:
    """Whether the op is a user's mark on a value."""
    return Trait.ANNOTATION in lookup(op.name, op.location).traits


def factorize(function: Function) -> Factoring:
    """The slots and classes of all values of `function`, a function of the global stage."""
    rules = Rules.of(function)
    return _Factors(function, rules, boundaries_of(rules)).result()


@lately(4)
def factoring_of(module: Module) -> Factoring:
    """The slots and classes of the entry of a module of the global stage, with calls written out."""
    return factorize(whole_of(module).function)


@dataclass
class Factored:
    """The factoring of the last module that was asked for, whatever its marks say: for programs marked in many ways."""

    module: Module | None = None
    factoring: Factoring | None = None

    def of(self, module: Module, marked: Module) -> Factoring:
        """That of the entry of `marked` with calls written out: of `module`, marked on the same values as the last."""
        if self.factoring is None or self.module is not module:
            self.module, self.factoring = module, factoring_of(marked)
        return self.factoring


@dataclass(slots=True)
class _Factors:
    """Slots, atoms and classes from the boundaries of dims."""

    function: Function
    rules: Rules
    boundaries: Joint | Carried
    slots: dict[str, Dims] = field(default_factory=dict)

    def result(self) -> Factoring:
        self._cut()
        slots, names, rules, torn = self.slots, self.rules.names, self.rules.rules, self.boundaries.torn
        classes = Joined(slots)
        atoms: list[tuple[Atom, ...]] = []
        blocked: list[int] = []
        # Ops of one rule on dims cut alike have the same atoms: those of a function in all its calls.
        known: dict[object, _Atoms] = {}
        alike: dict[object, int] = {}
        cuts = {name: alike.setdefault(dims, len(alike)) for name, dims in slots.items()}
        first, join = classes.first, classes.join
        for number, op in enumerate(self.function.ops):
            mine = names[number]
            key = (id(rules[number]), torn(number), *[cuts[name] for name in mine])
            if key not in known:
                found, alone = self._atoms(number), _held_alone(op) if is_annotation(op) else []
                dims = [slots[name] for name in mine]
                known[key] = _Atoms.of([*found, *alone], self._window_atoms(number, slots), len(found), dims)
            same = known[key]
            for t, place, u, other in same.ties:
                join(first[mine[t]] + place, first[mine[u]] + other)
            blocked += [first[mine[t]] + place for t, place in same.blocked]
            atoms.append(same.atoms)
        return Factoring(slots, tuple(atoms), classes, frozenset(map(classes.standing, blocked)))

    def _cut(self) -> None:
        """Divide dims into slots at their boundaries."""
        plain: dict[tuple[int, ...], Dims] = {}
        # Dims that are joined have one set of boundaries.
        cut: dict[tuple[int, ...], Dims] = {}
        slots, fine, of_dim = self.slots, self.boundaries.fine, self.boundaries.of_dim
        for name, shape in self.rules.shapes.items():
            if name in fine:
                marks = [of_dim(name, dim) for dim in range(len(shape))]
                key = tuple(map(id, marks))
                if key not in cut:
                    bounds = [sorted(mine, reverse=True) for mine in marks]
                    cut[key] = tuple(tuple(a // b for a, b in pairwise(mine)) for mine in bounds)
                slots[name] = cut[key]
                continue
            if shape not in plain:
                plain[shape] = tuple((n,) if n > 1 else () for n in shape)
            slots[name] = plain[shape]
        for op in filter(is_annotation, self.function.ops):
            for value in (*op.operands, *op.results):
                # What has one element or none can lie with one device, though no op can be split along it.
                sizes = zip(slots[value.name], value.tensor.shape, strict=True)
                slots[value.name] = tuple(mine or (n,) for mine, n in sizes)

    def _bounds(self, name: str, dim: int) -> list[int]:
        return sorted(self.boundaries.of_dim(name, dim), reverse=True)

    def _window_atoms(self, number: int, slots: Mapping[str, Dims]) -> list[Atom]:
        """The windows of one op, between the outermost slots of their dims: a device's part is one block."""
        op = self.function.ops[number]
        atoms = []
        for window in self.rules.rules[number].windows:
            places: list[tuple[int, int] | None] = [None] * (len(op.operands) + len(op.results))
            source, target = op.operands[window.operand], op.results[0]
            if min(source.tensor.shape[window.operand_dim], target.tensor.shape[window.result_dim]) > 1:
                places[window.operand] = (window.operand_dim, 0)
                places[len(op.operands)] = (window.result_dim, 0)
                name = f"window {window.index}"
                atoms.append(Atom(name, WINDOW, window.size, tuple(places), window.reach))
        return atoms

    def _atoms(self, number: int) -> list[Atom]:
        op, rule = self.function.ops[number], self.rules.rules[number]
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
            if index in self.boundaries.torn(number):
                for t, name, dim, offset in where:
                    marks = self._bounds(name, dim)
                    for i, (high, low) in enumerate(pairwise(marks)):
                        if low < offset * factor.size and high > offset:
                            places = tuple((dim, i) if u == t else None for u in range(len(tensors)))
                            atoms.append(Atom(factor.name, BLOCKED, high // low, places))
                continue
            for high, low in pairwise(sorted(self.boundaries.of_factor(number, index), reverse=True)):
                found: dict[int, tuple[int, int]] = {}
                for t, name, dim, offset in where:
                    found[t] = (dim, self._bounds(name, dim).index(offset * high))
                atoms.append(
                    Atom(factor.name, factor.kind, high // low, tuple(found.get(t) for t in range(len(tensors))))
                )
        return atoms


@dataclass(frozen=True, slots=True)
class _Atoms:
    """The atoms of an op, the slots of tensors that they tie together, and those that must be whole.

    A slot is (tensor, number of the slot among those of the tensor).
    """

    atoms: tuple[Atom, ...]
    ties: tuple[tuple[int, int, int, int], ...]
    blocked: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tying: Sequence[Atom], windows: Sequence[Atom], count: int, dims: Sequence[Dims]) -> _Atoms:
        """`tying` are those that join dims; the first `count` are the rule's. `dims` are the tensors' slots."""
        ties, blocked = [], []
        for number, atom in enumerate(tying):
            members = [(t, place_in(dims[t], *place)) for t, place in enumerate(atom.places) if place]
            ties += [(*a, *b) for a, b in pairwise(members)]
            if atom.kind == BLOCKED and number < count:
                blocked += members
        return cls((*tying, *windows), tuple(ties), tuple(blocked))


def _held_alone(op: Op) -> list[Atom]:
    """The dims of a marked value that have one element or none: it lies as its mark says."""
    dims = enumerate(op.results[0].tensor.shape)
    return [Atom(f"held {dim}", PARALLEL, size, ((dim, 0), (dim, 0))) for dim, size in dims if size <= 1]
