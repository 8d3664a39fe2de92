"""How far annotations reach: from each annotated value, forwards and backwards over the factors of ops.

The search is breadth first over all annotations of a round at once, so the nearest annotation decides; it stops at
values that are laid out otherwise and at ops that need a factor whole. Annotations of a later round (an attribute of
the mark; a user's are of round 0) reach what earlier ones have left. Every value keeps the reason for its layout.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from distir_relax.errors import AnnotationError
from distir_relax.ir import Function, Op, Reason, Value
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, Shard
from distir_relax.layout.partition import Divide, balanced, dividing, nested, refined, scaled, units_of
from distir_relax.layout.validate import fit_annotation
from distir_relax.ops import BLOCKED, WINDOW
from distir_relax.sharding.factors import Atom, Factoring, Slot, is_annotation

Split = tuple[int, int]
"""(dim, slot index): what of a value is split along a mesh axis."""


@dataclass(slots=True)
class Wanted:
    """What annotations ask for.

    `splits[value][axis]` is the split wanted along a mesh axis, or None; `pinned` are the values the user laid out;
    `units[axis][class]` is how the units of a class are cut along the axis; `reasons[value, axis]` says why;
    `pending[value, axis]` is the reduction that is still to be made along an axis.
    """

    splits: dict[str, list[Split | None]]
    pinned: dict[str, Op]
    units: list[dict[Slot, Cut]]
    reasons: dict[tuple[str, int], Reason] = field(default_factory=dict)
    pending: dict[tuple[str, int], Partial] = field(default_factory=dict)


def spread(function: Function, factoring: Factoring, mesh: DeviceMesh) -> Wanted:
    """What every value's layout should be, given the annotations in `function` (global stage).

    Raises `PlacementError` for a placement that does not fit its tensor and `AnnotationError` for two that cannot
    both hold.
    """
    search = _Search(function, factoring, mesh)
    for op in function.ops:
        if is_annotation(op):
            search.pin(op)
    search.run()
    search.refine()
    return search.wanted


def split_of(value: Value, placement: Shard, factoring: Factoring) -> Slot:
    """The slot that ``S[dim]`` cuts in an annotated value: the outermost of the dim's that every user can bear."""
    slots = [(value.name, placement.dim, i) for i in range(len(factoring.slots[value.name][placement.dim]))]
    return next((slot for slot in slots if not factoring.is_blocked(slot)), slots[0])


@dataclass(slots=True)
class _Search:
    function: Function
    factoring: Factoring
    mesh: DeviceMesh
    wanted: Wanted = field(init=False)
    rounds: dict[int, deque[tuple[str, int, Split, str]]] = field(default_factory=lambda: defaultdict(deque))
    users: Mapping[str, list[tuple[int, int]]] = field(init=False)
    """For each value, the (op number, tensor index) where it stands."""
    names: list[list[str]] = field(init=False)
    """For each op, the names of its operands and results."""
    ways: dict[tuple[int, int, Split], list[tuple[int, Split, Atom]]] = field(default_factory=dict)
    cut_by: dict[tuple[int, Slot], str] = field(default_factory=dict)
    """Who gave the sizes of a class along an axis, when somebody did."""
    stored: frozenset[str] = field(init=False)
    """The names of inputs."""
    asked: dict[str, Op] = field(default_factory=dict)
    """The first mark of each input."""
    divisions: dict[tuple[int, Slot], Divide] = field(default_factory=dict)
    """How classes are to be divided along an axis for which a mark says that without sizes: in blocks, or by shares."""

    def __post_init__(self) -> None:
        values = [i.value for i in self.function.inputs] + [v for op in self.function.ops for v in op.results]
        axes = len(self.mesh.shape)
        self.stored = frozenset(item.value.name for item in self.function.inputs)
        self.wanted = Wanted({v.name: [None] * axes for v in values}, {}, [{} for _ in range(axes)])
        users: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.names = [[v.name for v in (*op.operands, *op.results)] for op in self.function.ops]
        for number, names in enumerate(self.names):
            for position, name in enumerate(names):
                users[name].append((number, position))
        self.users = users

    def pin(self, op: Op) -> None:
        """Take up one annotation."""
        value, text = op.results[0], str(op.attrs["placements"])
        placements = fit_annotation(text, self.mesh, value.tensor.shape, op.location)
        self._reject_contradiction(op, text)
        self.wanted.pinned[value.name] = op
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                self.wanted.pending[value.name, axis] = placement
                # What makes the value leaves it so, rather than reduce it first.
                if not self._is_stored(source := op.operands[0].name) and source not in self.wanted.pinned:
                    self.wanted.pending[source, axis] = placement
            if not isinstance(placement, Shard):
                continue
            slot = split_of(value, placement, self.factoring)
            self._cut(slot, axis, placement, op.location)
            self.wanted.splits[value.name][axis] = slot[1:]
            self.wanted.reasons[value.name, axis] = Reason(value.name, axis, op.location)
            self.rounds[_round(op)].append((value.name, axis, slot[1:], op.location))

    def _reject_contradiction(self, op: Op, text: str) -> None:
        source = op.operands[0].name
        if not self._is_stored(source):
            return
        other = self.asked.setdefault(source, op)
        if other.attrs["placements"] != text:
            raise AnnotationError(
                f"%{source} is annotated {other.attrs['placements']!r} at {other.location} and {text!r} here",
                op.location,
                "a tensor is stored one way: give it one placement",
            )

    def _is_stored(self, name: str) -> bool:
        return name in self.stored

    def _cut(self, slot: Slot, axis: int, placement: Placement, where: str) -> None:
        assert isinstance(placement, Shard)
        ranks, size = self.mesh.shape[axis], self.factoring.size(slot)
        owner = self.factoring.classes[slot]
        if placement.cut is None:
            units = Cut.of(*dividing(placement)(size, ranks))
        else:
            units = units_of(placement.cut, *self._extent(slot), where)
        is_sized = placement.cut is not None
        asked = is_sized or placement.chunk or bool(placement.shares)
        given = self.cut_by.get((axis, owner))
        if asked and given is not None and self.wanted.units[axis][owner] != units:
            raise AnnotationError(
                f"{placement} cuts a dim that the annotation at {given} cuts otherwise",
                where,
                "give both the same sizes",
            )
        if asked or owner not in self.wanted.units[axis]:
            self.wanted.units[axis][owner] = units
        if asked:
            self.cut_by[axis, owner] = where
            self.divisions.pop((axis, owner), None)
            if not is_sized:
                self.divisions[axis, owner] = dividing(placement)

    def _extent(self, slot: Slot) -> tuple[int, int, int]:
        outer, inner = self.factoring.around(slot)
        return outer, self.factoring.size(slot), inner

    def run(self) -> None:
        """Carry every wanted split as far as it goes, round by round."""
        for number in sorted(self.rounds):
            self._run(self.rounds[number])

    def _run(self, queue: deque[tuple[str, int, Split, str]]) -> None:
        pinned, splits, reasons = self.wanted.pinned, self.wanted.splits, self.wanted.reasons
        ops, users, names = self.function.ops, self.users, self.names
        while queue:
            name, axis, split, annotation = queue.popleft()
            for number, position in users[name]:
                mine = names[number]
                for other, place, atom in self._ways(number, position, split):
                    value = mine[other]
                    if atom.kind == WINDOW:
                        self._cut_alike(axis, (name, *split), (value, *place))
                    if splits[value][axis] is not None or value in pinned:
                        continue
                    op = ops[number]
                    way = () if is_annotation(op) else (op.name, atom.name, self._stored(name))
                    splits[value][axis] = place
                    reasons[value, axis] = Reason(value, axis, annotation, *way)
                    queue.append((value, axis, place, annotation))

    def _ways(self, number: int, position: int, split: Split) -> list[tuple[int, Split, Atom]]:
        """Where an op carries a split of one of its tensors: to which tensors, how, and by what."""
        atoms = self.factoring.atoms[number]
        key = (id(atoms), position, split)
        found = self.ways.get(key)
        if found is None:
            found = self.ways[key] = [
                (other, place, atom)
                for atom in atoms
                if atom.places[position] == split and atom.kind != BLOCKED
                for other, place in enumerate(atom.places)
                if place is not None
            ]
        return found

    def refine(self) -> None:
        """Where values are split along several axes by one class, divide what one axis leaves by the next.

        Sizes that a user gave stay; the other axes divide within them, in the order of the mesh. Where two annotations
        gave sizes that do not divide each other's parts, values between them keep the split of the first axis alone.
        """
        together: dict[Slot, list[str]] = defaultdict(list)
        for name, splits in self.wanted.splits.items():
            for split in {s for s in splits if s is not None}:
                if splits.count(split) > 1:
                    together[self.factoring.classes[name, *split]].append(name)
        for owner, names in together.items():
            shared = {axis for name in names for axis in self._axes_of(name, owner)}
            done: list[Cut] = []
            for axis in sorted(shared, key=lambda a: (not self._is_sized(a, owner), a)):
                cut = self._refined(owner, axis, done)
                if all(nested(other, cut) for other in done):
                    done.append(cut)
                    continue
                for name in names:
                    if name not in self.wanted.pinned and axis in self._axes_of(name, owner):
                        self.wanted.splits[name][axis] = None
                        del self.wanted.reasons[name, axis]

    def _axes_of(self, name: str, owner: Slot) -> list[int]:
        """The axes along which a value is to be split by a class."""
        splits = enumerate(self.wanted.splits[name])
        return [axis for axis, s in splits if s is not None and self.factoring.classes[name, *s] == owner]

    def _refined(self, owner: Slot, axis: int, others: list[Cut]) -> Cut:
        """The cut of a class along an axis, beside those along others: as the user gave it, or dividing theirs."""
        units, ranks, size = self.wanted.units[axis], self.mesh.shape[axis], self.factoring.size(owner)
        if not self._is_sized(axis, owner):
            divide = self.divisions.get((axis, owner), balanced)
            block = Cut.of(*divide(size, ranks))
            fits = all(nested(other, block) for other in others)
            units[owner] = block if fits else refined(size, others, ranks, divide)
        return units[owner]

    def _is_sized(self, axis: int, owner: Slot) -> bool:
        return (axis, owner) in self.cut_by and (axis, owner) not in self.divisions

    def _cut_alike(self, axis: int, source: Slot, target: Slot) -> None:
        """Cut a dim behind a window, or before it, in the proportions that the user gave the other."""
        classes, units = self.factoring.classes, self.wanted.units[axis]
        given = self.cut_by.get((axis, classes[source]))
        if given is None or classes[target] in units or not units[classes[source]].is_block:
            return
        (segment,) = units[classes[source]].segments
        units[classes[target]] = Cut.of(*scaled(segment.sizes, self.factoring.size(target)))
        self.cut_by[axis, classes[target]] = given

    def _stored(self, name: str) -> str:
        """The input that a user's mark is on, or else the value itself."""
        marked = self.wanted.pinned.get(name)
        return marked.operands[0].name if marked and self._is_stored(marked.operands[0].name) else name


def _round(op: Op) -> int:
    found = op.attrs.get("round", 0)
    return found if isinstance(found, int) else 0
