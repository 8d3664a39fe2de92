"""Factor classes: factors of all ops of a program, joined into equivalence classes of dims.

Each op's rule says which of its dims share a factor. For a whole program this divides each dim of each value into
*slots*, outermost first (a fused QKV projection's 2304 columns are ``3 12 64``: parts, heads, width), and joins the
slots that ops tie together into *classes* (the 12 heads, wherever they appear). A class is split as a whole: it is cut
once for all its members, in units that every one of them allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from distir_relax.ir import Function, Instance, Module, Op, inlined_main, memoize
from distir_relax.layout import is_symbolic
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, PrefixWindow, Trait, lookup
from distir_relax.sharding.components import Edges, IntArray, components, equal_rows
from distir_relax.sharding.factor_split import (
    Body,
    Dims,
    JoinedBoundaries,
    PropagatedBoundaries,
    Rules,
    find_boundaries,
)

Slot = tuple[str, int, int]
"""(value name, dim, slot index in the dim counted from the outermost)."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of one op's factor that is a single slot in every tensor.

    `places` has, for each operand and then each result, its (dim, slot), or None. An atom of kind ``window`` ties the
    two dims of a sliding window, which are cut separately; `reach` is the maximum number of halo elements of a device.
    """

    name: str
    kind: str
    size: int
    places: tuple[tuple[int, int] | None, ...]
    reach: int = 0
    is_prefix: bool = False


class SlotClasses:
    """Classes of slots; ``classes[slot]`` is the slot that represents its class."""

    def __init__(self, slots: Mapping[str, Dims]) -> None:
        self._slots = slots
        # Values without slots have the index of the next value.
        self.firsts = np.cumsum([0, *[sum(map(len, dims)) for dims in slots.values()]])
        """The index of the first slot of each value, in one numbering of all slots."""
        self.names = list(slots)
        """The names of values by number."""
        self.numbers = {name: number for number, name in enumerate(self.names)}
        """The number of each value."""
        self.roots: IntArray = np.zeros(0, dtype=np.int64)
        """The index of the slot that represents the class of each slot."""
        self._first: list[int] = self.firsts.tolist()
        self._roots: list[int] = []
        self._representatives: dict[int, Slot] = {}

    def __getitem__(self, slot: Slot) -> Slot:
        name, dim, index = slot
        if dim:
            index = slot_index(self._slots[name], dim, index)
        return self.representative(self._first[self.numbers[name]] + index)

    def index(self, slot: Slot) -> int:
        """Return the index of a slot in the numbering of all slots."""
        name, dim, index = slot
        return self._first[self.numbers[name]] + slot_index(self._slots[name], dim, index)

    def place(self, value: int, number: int) -> tuple[int, int]:
        """Return the dim and the slot index in it of a slot, by index, of the value of this number."""
        dims, index = self._slots[self.names[value]], number - self._first[value]
        dim = 0
        while index >= len(dims[dim]):
            index -= len(dims[dim])
            dim += 1
        return dim, index

    def representative(self, number: int) -> Slot:
        """Return the representative slot of the class of a slot, by index."""
        root = self._roots[number]
        found = self._representatives.get(root)
        if found is None:
            value = int(np.searchsorted(self.firsts, root, "right")) - 1
            found = self._representatives[root] = self.names[value], *self.place(value, root)
        return found

    def join(self, edges: Sequence[Edges]) -> None:
        """Join the classes of slots, by index; once, before any lookup."""
        self.roots = components(int(self.firsts[-1]), edges)
        self._roots = self.roots.tolist()


def slot_index(dims: Dims, dim: int, index: int) -> int:
    """Return the index of a slot among those of its value."""
    return index if dim == 0 else index + sum(map(len, dims[:dim]))


@dataclass(frozen=True, slots=True)
class AtomGroup:
    """Ops of equal atoms on equally divided dims: their numbers, and the numbers of their tensors, one row for each."""

    atoms: tuple[Atom, ...]
    numbers: IntArray
    tensors: IntArray


@dataclass(frozen=True, slots=True)
class Factoring:
    """The slots, atoms and classes of one function.

    Slots have generic values of symbolic sizes; `sizes` has those sizes by the representative of the class. `groups`
    has all ops by their `atoms`, `dims_id` a number for each value, equal for values of equal slots, and `bodies` the
    functions that were inlined.
    """

    slots: dict[str, Dims]
    atoms: tuple[tuple[Atom, ...], ...]
    classes: SlotClasses
    blocked: frozenset[Slot]
    groups: tuple[AtomGroup, ...]
    dims_id: IntArray
    bodies: tuple[Body, ...]
    sizes: Mapping[Slot, int] = field(default_factory=dict)

    def size(self, slot: Slot) -> int:
        """Return the number of units in a slot."""
        value, dim, index = slot
        number = self.slots[value][dim][index]
        return self.sizes.get(self.classes[slot], number) if self.sizes else number

    def around(self, slot: Slot) -> tuple[int, int]:
        """Return the number of repetitions of the slot in its dim, and of elements per unit: (outer, inner)."""
        value, dim, index = slot
        sizes: Sequence[int] = self.slots[value][dim]
        if self.sizes:
            sizes = [self.size((value, dim, i)) for i in range(len(sizes))]
        return math.prod(sizes[:index]), math.prod(sizes[index + 1 :])

    def without_windows(self) -> Factoring:
        """Return the factoring without splits along the dims of sliding windows."""
        if not any(atom.kind == WINDOW for atoms in self.atoms for atom in atoms):
            return self
        atoms = tuple(tuple(atom for atom in atoms if atom.kind != WINDOW) for atoms in self.atoms)
        groups = (replace(g, atoms=tuple(atom for atom in g.atoms if atom.kind != WINDOW)) for g in self.groups)
        return replace(self, atoms=atoms, groups=tuple(groups))

    def is_blocked(self, slot: Slot) -> bool:
        """Whether some op of the program needs the slot's class unsplit."""
        return self.classes[slot] in self.blocked


def is_annotation(op: Op) -> bool:
    """Whether the op is an active sharding annotation."""
    return Trait.ANNOTATION in lookup(op.name, op.location).traits and not op.attrs.get("inactive")


def annotations_of(function: Function) -> list[Op]:
    """Return the active sharding annotations of a function."""
    names = {name for name in {op.name for op in function.ops} if Trait.ANNOTATION in lookup(name).traits}
    return [op for op in function.ops if op.name in names and not op.attrs.get("inactive")]


def with_annotations(function: Function, active: bool) -> Function:
    """Return a function with its annotations active, or inactive: without effect, as if they were for another mesh."""

    def switch(op: Op) -> Op:
        attrs = {key: value for key, value in op.attrs.items() if key != "inactive"}
        return replace(op, attrs=attrs if active else {**attrs, "inactive": True})

    is_one = [Trait.ANNOTATION in lookup(op.name, op.location).traits for op in function.ops]
    ops = (switch(op) if annotates else op for op, annotates in zip(function.ops, is_one, strict=True))
    return replace(function, ops=tuple(ops)) if any(is_one) else function


def factorize(function: Function, instance: Instance | None = None) -> Factoring:
    """Compute the slots and classes of all values of `function`, a function of the global stage.

    `instance` is the tree of calls that an inlined function has its ops from.
    """
    rules = Rules.of(function, instance)
    return _Factors(function, rules, find_boundaries(rules)).result()


@memoize(4)
def factoring_of(module: Module) -> Factoring:
    """Compute the slots and classes of the inlined entry function of a module of the global stage."""
    inlined = inlined_main(module)
    return factorize(inlined.function, inlined.instance)


@dataclass
class FactoringCache:
    """Cache of the factoring of the last module, shared by programs that annotate it differently."""

    module: Module | None = None
    factoring: Factoring | None = None

    def of(self, module: Module, marked: Module) -> Factoring:
        """Return the factoring of `marked`, inlined: `module` with annotations on the same values as the last time."""
        if self.factoring is None or self.module is not module:
            self.module, self.factoring = module, factoring_of(marked)
        return self.factoring


@dataclass(slots=True)
class _Factors:
    """Builds slots, atoms and classes from the boundaries of dims."""

    function: Function
    rules: Rules
    boundaries: JoinedBoundaries | PropagatedBoundaries
    slots: dict[str, Dims] = field(default_factory=dict)

    def result(self) -> Factoring:
        self._cut()
        slots, boundaries, ops = self.slots, self.boundaries, self.function.ops
        classes = SlotClasses(slots)
        atoms: list[tuple[Atom, ...]] = [()] * len(ops)
        edges: list[Edges] = []
        blocked: list[IntArray] = []
        groups: list[AtomGroup] = []
        dims_ids: dict[object, int] = {}
        dims_id = np.array([dims_ids.setdefault(slots[name], len(dims_ids)) for name in self.rules.shapes])
        conflict_ids: dict[object, int] = {}
        # Ops of one rule on equally divided dims have the same atoms, as in all calls of a function.
        for group in self.rules.groups:
            conflicts = [conflict_ids.setdefault(boundaries.conflicts(n), len(conflict_ids)) for n in group.numbers]
            for rows in equal_rows(np.column_stack([dims_id[group.tensors], conflicts])):
                members = [group.numbers[row] for row in rows.tolist()]
                found = self._op_atoms(members[0])
                for number in members:
                    atoms[number] = found.atoms
                groups.append(AtomGroup(found.atoms, np.array(members, dtype=np.int64), group.tensors[rows]))
                firsts = classes.firsts[group.tensors[rows]]
                edges += [(firsts[:, t] + slot, firsts[:, u] + other) for t, slot, u, other in found.ties]
                blocked += [firsts[:, t] + slot for t, slot in found.blocked]
        classes.join(edges)
        blocked_slots = frozenset(classes.representative(slot) for part in blocked for slot in np.unique(part).tolist())
        sizes = _symbolic_sizes(self.function, slots, classes)
        bodies = tuple(self.rules.bodies)
        return Factoring(slots, tuple(atoms), classes, blocked_slots, tuple(groups), dims_id, bodies, sizes)

    def _op_atoms(self, number: int) -> _Atoms:
        op = self.function.ops[number]
        rule_atoms, extra = self._atoms(number), _replicated_atoms(op) if is_annotation(op) else []
        dims = [self.slots[name] for name in self.rules.names(number)]
        return _Atoms.of([*rule_atoms, *extra], self._window_atoms(number, self.slots), len(rule_atoms), dims)

    def _cut(self) -> None:
        """Divide dims into slots at their boundaries."""
        slots = self.slots = self.boundaries.slots()
        for op in annotations_of(self.function):
            for value in (*op.operands, *op.results):
                # A dim of at most one element can be annotated, though no op can be split along it.
                dims = slots[value.name]
                if () in dims:
                    sizes = zip(dims, self.rules.shapes[value.name], strict=True)
                    slots[value.name] = tuple(parts or (n,) for parts, n in sizes)

    def _bounds(self, name: str, dim: int) -> list[int]:
        return sorted(self.boundaries.dim_boundaries(name, dim), reverse=True)

    def _window_atoms(self, number: int, slots: Mapping[str, Dims]) -> list[Atom]:
        """Return the window atoms of one op, between the outermost slots of their dims: a device has one block."""
        op = self.function.ops[number]
        atoms = []
        for window in self.rules.rules[number].windows:
            places: list[tuple[int, int] | None] = [None] * (len(op.operands) + len(op.results))
            source, target = op.operands[window.operand], op.results[0]
            shapes = self.rules.shapes
            if min(shapes[source.name][window.operand_dim], shapes[target.name][window.result_dim]) > 1:
                places[window.operand] = (window.operand_dim, 0)
                places[len(op.operands)] = (window.result_dim, 0)
                name = f"window {window.index}"
                is_prefix = isinstance(window, PrefixWindow)
                atoms.append(Atom(name, WINDOW, window.size, tuple(places), window.reach, is_prefix))
        return atoms

    def _atoms(self, number: int) -> list[Atom]:
        op, rule = self.function.ops[number], self.rules.rules[number]
        tensors = [*op.operands, *op.results]
        dims = [*rule.operands, *rule.results]
        atoms: list[Atom] = []
        for index, factor in enumerate(rule.factors):
            positions = []
            for t, value in enumerate(tensors):
                for dim, factors in enumerate(dims[t]):
                    if index in factors:
                        offset = math.prod(rule.factors[f].size for f in factors[factors.index(index) + 1 :])
                        positions.append((t, value.name, dim, offset))
            if index in self.boundaries.conflicts(number):
                for t, name, dim, offset in positions:
                    boundaries = self._bounds(name, dim)
                    for i, (high, low) in enumerate(pairwise(boundaries)):
                        if low < offset * factor.size and high > offset:
                            places = tuple((dim, i) if u == t else None for u in range(len(tensors)))
                            atoms.append(Atom(factor.name, BLOCKED, high // low, places))
                continue
            for high, low in pairwise(sorted(self.boundaries.factor_boundaries(number, index), reverse=True)):
                slot_of: dict[int, tuple[int, int]] = {}
                for t, name, dim, offset in positions:
                    slot_of[t] = (dim, self._bounds(name, dim).index(offset * high))
                atoms.append(
                    Atom(factor.name, factor.kind, high // low, tuple(slot_of.get(t) for t in range(len(tensors))))
                )
        return atoms


@dataclass(frozen=True, slots=True)
class _Atoms:
    """The atoms of an op, the slots of tensors that they tie together, and those that must not be split.

    A slot is (tensor, index of the slot among those of the tensor).
    """

    atoms: tuple[Atom, ...]
    ties: tuple[tuple[int, int, int, int], ...]
    blocked: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, joining: Sequence[Atom], windows: Sequence[Atom], count: int, dims: Sequence[Dims]) -> _Atoms:
        """`joining` are those that join dims, the first `count` of them the rule's. `dims` are the tensors' slots."""
        ties, blocked = [], []
        for number, atom in enumerate(joining):
            members = [(t, slot_index(dims[t], *place)) for t, place in enumerate(atom.places) if place]
            ties += [(*a, *b) for a, b in pairwise(members)]
            if atom.kind == BLOCKED and number < count:
                blocked += members
        return cls((*joining, *windows), tuple(ties), tuple(blocked))


def _replicated_atoms(op: Op) -> list[Atom]:
    """Return atoms of the dims of an annotated value with at most one element, so that its layout is preserved."""
    dims = enumerate(op.results[0].tensor.generic.shape)
    return [Atom(f"held {dim}", PARALLEL, size, ((dim, 0), (dim, 0))) for dim, size in dims if size <= 1]


def _symbolic_sizes(function: Function, slots: Mapping[str, Dims], classes: SlotClasses) -> dict[Slot, int]:
    """Return the symbolic sizes of classes, by their representatives.

    A class is a dim of some value, or the exact quotient of a dim and the other slots in it.
    """
    values = [item.value for item in function.inputs] + [v for op in function.ops for v in op.results]
    of_type = {id(value.type): value for value in values}
    symbolic = {key for key, value in of_type.items() if is_symbolic(value.tensor.shape)}
    if not symbolic:
        return {}
    dims: dict[tuple[int, tuple[Slot, ...]], tuple[int, ...]] = {}
    for value in values:
        for dim, size in enumerate(value.tensor.shape) if id(value.type) in symbolic else ():
            if is_symbolic(size):
                parts = slots[value.name][dim]
                dims[size, tuple(classes[value.name, dim, i] for i in range(len(parts)))] = parts
    sizes: dict[Slot, int] = {}
    for (size, owners), parts in sorted(dims.items(), key=lambda item: len(item[1])):
        unknown = [owner for owner, part in zip(owners, parts, strict=True) if owner not in sizes and part >= _LARGE]
        if len(unknown) == 1:
            others = zip(owners, parts, strict=True)
            known = math.prod(sizes.get(owner, part) for owner, part in others if owner != unknown[0])
            sizes[unknown[0]] = size // known
    return sizes


_LARGE = 1 << 24
"""Generic values of symbolic sizes are larger; the parts of other dims of a model are smaller."""
