"""Propagation of annotations over the factors of ops, forwards and backwards.

The search is breadth first from all annotations of a round at once, so the nearest annotation decides. It stops at
values that already have a split, at ops that need a factor unsplit, and at partial sums that are annotated as
replicated: those are all-reduced, rather than scattered and gathered. Annotations of a later round (an attribute of the
annotation op; a user's have round 0) reach values that earlier rounds left. Every split has a `Reason`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distir_relax.errors import AnnotationError
from distir_relax.ir import Function, Op, Value
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Shard
from distir_relax.layout.partition import (
    Divide,
    balanced,
    cut_in_units,
    is_nested,
    partition_rule,
    refine_cut,
    scale_sizes,
)
from distir_relax.layout.validate import validate_annotation
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW
from distir_relax.sharding.factors import Atom, Factoring, Slot, is_annotation

Split = tuple[int, int]
"""(dim, slot index): the slot of a value that is split along a mesh axis."""


Cause = tuple[str, Op | None, str, str]
"""The cause of a split: the location of the annotation, and the op, factor and value through which it came, if any."""


@dataclass(slots=True)
class TargetSplits:
    """Splits of all values that annotations request, as found by propagation.

    `splits[value][axis]` is the split along a mesh axis, or None; `pinned` maps annotated values to their annotations;
    `units[axis][class]` is the cut of a factor class along the axis; `causes[value, axis]` is the cause of a split;
    `partial[value, axis]` is the pending reduction along an axis. `inputs` are the names of the program's inputs.
    """

    splits: dict[str, list[Split | None]]
    pinned: dict[str, Op]
    units: list[dict[Slot, Cut]]
    inputs: frozenset[str]
    causes: dict[tuple[str, int], Cause] = field(default_factory=dict)
    partial: dict[tuple[str, int], Partial] = field(default_factory=dict)

    def source(self, cause: Cause) -> str:
        """Return the value from which a split came: the input that its annotation is on, if it is one; or empty."""
        _, op, _, name = cause
        if op is None or is_annotation(op):
            return ""
        marked = self.pinned.get(name)
        return marked.operands[0].name if marked and marked.operands[0].name in self.inputs else name


def propagate_annotations(function: Function, factoring: Factoring, mesh: DeviceMesh) -> TargetSplits:
    """Propagate the annotations in `function` (global stage) to all values.

    Raises `PlacementError` for a placement that does not fit its tensor and `AnnotationError` for contradictory ones.
    """
    search = _Search(function, factoring, mesh)
    for op in function.ops:
        if is_annotation(op):
            search.pin(op)
    search.run()
    search.refine()
    return search.targets


def annotated_slot(value: Value, placement: Shard, factoring: Factoring) -> Slot:
    """Return the slot that ``S[dim]`` splits in an annotated value: the outermost of the dim that no op blocks."""
    slots = [(value.name, placement.dim, i) for i in range(len(factoring.slots[value.name][placement.dim]))]
    return next((slot for slot in slots if not factoring.is_blocked(slot)), slots[0])


_Edge = tuple[int, Split, str, bool]
"""Another tensor of an op, which a split propagates to: its index, split, factor, and whether that is a window."""

_User = tuple[int, list[str], dict[Split, list[_Edge]]]
"""A user of a value: the op's number, the names of its tensors, and the edges for each split of the value."""


@dataclass(slots=True)
class _Search:
    function: Function
    factoring: Factoring
    mesh: DeviceMesh
    targets: TargetSplits = field(init=False)
    rounds: dict[int, deque[tuple[str, int, Split, str]]] = field(default_factory=lambda: defaultdict(deque))
    users: Mapping[str, list[_User]] = field(init=False)
    """For each value, its uses and its definition."""
    sized_by: dict[tuple[int, Slot], str] = field(default_factory=dict)
    """The location of the annotation that gave sizes or a rule for a class along an axis."""
    annotations: dict[str, Op] = field(default_factory=dict)
    """The first annotation of each input."""
    unsplit: set[tuple[str, int]] = field(default_factory=set)
    """The values, each with a mesh axis, that are not split, as their only user is an annotation without a split."""
    partition_rules: dict[tuple[int, Slot], Divide] = field(default_factory=dict)
    """The rule, in blocks, by shares or at multiples, of classes along an axis whose annotation has no sizes."""
    valid: dict[tuple[str, tuple[int, ...]], tuple[Placement, ...]] = field(default_factory=dict)
    """Placements that fit tensors, by their text and the tensor's shape."""

    def __post_init__(self) -> None:
        values = [i.value for i in self.function.inputs] + [v for op in self.function.ops for v in op.results]
        axes = len(self.mesh.shape)
        inputs = frozenset(item.value.name for item in self.function.inputs)
        self.targets = TargetSplits({v.name: [None] * axes for v in values}, {}, [{} for _ in range(axes)], inputs)
        users: dict[str, list[_User]] = {v.name: [] for v in values}
        tables: dict[tuple[int, int], list[dict[Split, list[_Edge]]]] = {}
        for number, op in enumerate(self.function.ops):
            names = [v.name for v in (*op.operands, *op.results)]
            atoms = self.factoring.atoms[number]
            key = id(atoms), len(names)
            edges = tables.get(key)
            if edges is None:
                edges = tables[key] = [_edges(atoms, position) for position in range(len(names))]
            for name, table in zip(names, edges, strict=True):
                users[name].append((number, names, table))
        self.users = users

    def pin(self, op: Op) -> None:
        """Add one annotation."""
        value, text = op.results[0], str(op.attrs["placements"])
        key = text, value.tensor.shape
        placements = self.valid.get(key)
        if placements is None:
            placements = self.valid[key] = validate_annotation(text, self.mesh, value.tensor.shape, op.location)
        self._reject_contradiction(op, text)
        self.targets.pinned[value.name] = op
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                self.targets.partial[value.name, axis] = placement
                # The producer leaves its result partial too, rather than reduce it first.
                if not self._is_input(source := op.operands[0].name) and source not in self.targets.pinned:
                    self.targets.partial[source, axis] = placement
            if placement == R and self._is_sum_for(op):
                self.unsplit.add((op.operands[0].name, axis))
            if not isinstance(placement, Shard):
                continue
            slot = annotated_slot(value, placement, self.factoring)
            self._set_units(slot, axis, placement, op.location)
            self.targets.splits[value.name][axis] = slot[1:]
            self.targets.causes[value.name, axis] = op.location, None, "", ""
            self.rounds[_round(op)].append((value.name, axis, slot[1:], op.location))

    def _is_sum_for(self, op: Op) -> bool:
        """Return whether an annotated value is a sum over a factor of its op, and has no other user."""
        source = op.operands[0].name
        uses = self.users[source]
        if self._is_input(source) or len(uses) != 2:
            return False
        return any(atom.kind not in (PARALLEL, BLOCKED, WINDOW) for atom in self.factoring.atoms[uses[0][0]])

    def _reject_contradiction(self, op: Op, text: str) -> None:
        source = op.operands[0].name
        if not self._is_input(source):
            return
        other = self.annotations.setdefault(source, op)
        if other.attrs["placements"] != text:
            raise AnnotationError(
                f"%{source} is annotated {other.attrs['placements']!r} at {other.location} and {text!r} here",
                op.location,
                "a tensor is stored one way: give it one placement",
            )

    def _is_input(self, name: str) -> bool:
        return name in self.targets.inputs

    def _set_units(self, slot: Slot, axis: int, placement: Placement, where: str) -> None:
        assert isinstance(placement, Shard)
        ranks, size = self.mesh.shape[axis], self.factoring.size(slot)
        owner = self.factoring.classes[slot]
        is_sized = placement.cut is not None
        is_explicit = is_sized or placement.chunk or bool(placement.shares) or placement.multiple > 1
        if not is_explicit and owner in self.targets.units[axis]:
            return
        rule = partition_rule(placement, self.factoring.around(slot)[1])
        if placement.cut is None:
            units = Cut.of(*rule(size, ranks))
        else:
            units = cut_in_units(placement.cut, *self._extent(slot), where)
        sized_at = self.sized_by.get((axis, owner))
        if is_explicit and sized_at is not None and self.targets.units[axis][owner] != units:
            raise AnnotationError(
                f"{placement} cuts a dim differently from the annotation at {sized_at}",
                where,
                "give both the same sizes",
            )
        self.targets.units[axis][owner] = units
        if is_explicit:
            self.sized_by[axis, owner] = where
            self.partition_rules.pop((axis, owner), None)
            if not is_sized:
                self.partition_rules[axis, owner] = rule

    def _extent(self, slot: Slot) -> tuple[int, int, int]:
        outer, inner = self.factoring.around(slot)
        return outer, self.factoring.size(slot), inner

    def run(self) -> None:
        """Propagate all splits, round by round."""
        for number in sorted(self.rounds):
            self._run(self.rounds[number])

    def _run(self, queue: deque[tuple[str, int, Split, str]]) -> None:
        pinned, splits, causes, unsplit = self.targets.pinned, self.targets.splits, self.targets.causes, self.unsplit
        ops, users = self.function.ops, self.users
        while queue:
            name, axis, split, annotation = queue.popleft()
            for number, names, table in users[name]:
                for other, place, factor, is_window in table.get(split, ()):
                    value = names[other]
                    if is_window:
                        self._scale_units(axis, (name, *split), (value, *place))
                    if splits[value][axis] is not None or value in pinned or (value, axis) in unsplit:
                        continue
                    splits[value][axis] = place
                    causes[value, axis] = annotation, ops[number], factor, name
                    queue.append((value, axis, place, annotation))

    def refine(self) -> None:
        """Where values are split along several axes by one class, nest the cuts of these axes.

        Sizes given by the user stay; the other axes divide within them, in the order of the mesh. If sizes of two
        annotations are not nested, values between them keep the split of the first axis only.
        """
        classes: dict[Slot, list[str]] = defaultdict(list)
        for name, splits in self.targets.splits.items():
            for split in {s for s in splits if s is not None}:
                if splits.count(split) > 1:
                    classes[self.factoring.classes[name, *split]].append(name)
        for class_, names in classes.items():
            shared = {axis for name in names for axis in self._axes_of(name, class_)}
            cuts: list[Cut] = []
            for axis in sorted(shared, key=lambda a: (not self._is_sized(a, class_), a)):
                cut = self._refine_class(class_, axis, cuts)
                if all(is_nested(other, cut) for other in cuts):
                    cuts.append(cut)
                    continue
                for name in names:
                    if name not in self.targets.pinned and axis in self._axes_of(name, class_):
                        self.targets.splits[name][axis] = None
                        del self.targets.causes[name, axis]

    def _axes_of(self, name: str, class_: Slot) -> list[int]:
        """Return the axes along which a value is split by a class."""
        splits = enumerate(self.targets.splits[name])
        return [axis for axis, s in splits if s is not None and self.factoring.classes[name, *s] == class_]

    def _refine_class(self, class_: Slot, axis: int, others: list[Cut]) -> Cut:
        """Return the cut of a class along an axis, given those along others: the user's, or one that divides theirs."""
        units, ranks, size = self.targets.units[axis], self.mesh.shape[axis], self.factoring.size(class_)
        if not self._is_sized(axis, class_):
            divide = self.partition_rules.get((axis, class_), balanced)
            block = Cut.of(*divide(size, ranks))
            fits = all(is_nested(other, block) for other in others)
            units[class_] = block if fits else refine_cut(size, others, ranks, divide)
        return units[class_]

    def _is_sized(self, axis: int, class_: Slot) -> bool:
        return (axis, class_) in self.sized_by and (axis, class_) not in self.partition_rules

    def _scale_units(self, axis: int, source: Slot, target: Slot) -> None:
        """Cut a dim on the other side of a window in the proportions of the user's cut."""
        classes, units = self.factoring.classes, self.targets.units[axis]
        sized_at = self.sized_by.get((axis, classes[source]))
        if sized_at is None or classes[target] in units or not units[classes[source]].is_block:
            return
        (segment,) = units[classes[source]].segments
        units[classes[target]] = Cut.of(*scale_sizes(segment.sizes, self.factoring.size(target)))
        self.sized_by[axis, classes[target]] = sized_at


def _edges(atoms: Sequence[Atom], position: int) -> dict[Split, list[_Edge]]:
    """Return the edges from the tensor at a position to the others, by its split."""
    edges: dict[Split, list[_Edge]] = defaultdict(list)
    for atom in atoms:
        split = atom.places[position]
        if split is not None and atom.kind != BLOCKED:
            places = enumerate(atom.places)
            others = [(other, place) for other, place in places if place is not None and other != position]
            edges[split] += [(other, place, atom.name, atom.kind == WINDOW) for other, place in others]
    return dict(edges)


def _round(op: Op) -> int:
    number = op.attrs.get("round", 0)
    return number if isinstance(number, int) else 0
