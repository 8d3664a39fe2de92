"""Propagation of annotations over the factors of ops, forwards and backwards.

The search is breadth first from all annotations of a round at once, so the nearest annotation decides. It stops at
values that already have a split, at ops that need a factor unsplit, and at partial sums that are annotated as
replicated: those are all-reduced, rather than scattered and gathered. Annotations of a later round (an attribute of the
annotation op; a user's have round 0) reach values that earlier rounds left. Every split has a cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from distir_relax.errors import AnnotationError
from distir_relax.ir import Function, Op, Value
from distir_relax.layout import (
    Cut,
    DeviceMesh,
    Partial,
    Placement,
    R,
    Shard,
    evaluate_size,
    is_symbolic,
    multiple_of_symbol,
    print_placements,
)
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
from distir_relax.sharding.components import IntArray
from distir_relax.sharding.factors import Factoring, Slot, annotations_of, is_annotation
from distir_relax.sharding.slot_graph import SlotGraph

Split = tuple[int, int]
"""(dim, slot index): the slot of a value that is split along a mesh axis."""


Cause = tuple[str, Op | None, str, str]
"""The cause of a split: the location of the annotation, and the op, factor and value through which it came, if any."""


@dataclass(slots=True)
class TargetSplits:
    """Splits of all values that annotations request, as found by propagation.

    `slots[axis, value]` is the index of the slot that is split along a mesh axis, -1 without a split, and
    `edges[axis, value]` the edge of the graph through which it was reached, -1 for an annotated value; both by the
    number of the value. `annotation_of` is the number of the annotation among `annotations`. `pinned` maps annotated
    values to their annotations; `units[axis][class]` is the cut of a factor class along the axis;
    `partial[value, axis]` is the pending reduction along an axis. `inputs` are the names of the program's inputs.
    """

    function: Function
    factoring: Factoring
    graph: SlotGraph
    slots: IntArray
    edges: IntArray
    annotation_of: IntArray
    units: list[dict[Slot, Cut]]
    inputs: frozenset[str]
    annotations: list[Op] = field(default_factory=list)
    pinned: dict[str, Op] = field(default_factory=dict)
    partial: dict[tuple[str, int], Partial] = field(default_factory=dict)
    _lists: tuple[list[list[int]], list[list[int]], list[list[int]]] | None = None

    def splits(self, name: str) -> list[Split | None]:
        """Return the split of a value along each axis, or None."""
        classes = self.factoring.classes
        value = classes.numbers[name]
        return [None if slot < 0 else classes.place(value, slot) for slot in self._as_lists()[0][value]]

    def cause(self, name: str, axis: int) -> Cause | None:
        """Return the cause of a value's split along an axis, None without a split."""
        slots, edges, annotations = self._as_lists()
        value = self.factoring.classes.numbers[name]
        if slots[value][axis] < 0:
            return None
        annotation, edge = self.annotations[annotations[value][axis]], edges[value][axis]
        if edge < 0:
            return annotation.location, None, "", ""
        op, factor, source = self.graph.describe(edge)
        return annotation.location, self.function.ops[op], factor, self.factoring.classes.names[source]

    def _as_lists(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Return the arrays as lists by value, which are faster to look up."""
        if self._lists is None:
            self._lists = self.slots.T.tolist(), self.edges.T.tolist(), self.annotation_of.T.tolist()
        return self._lists

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
    for op in annotations_of(function):
        search.pin(op)
    search.run()
    search.refine()
    return search.targets


def annotated_slot(value: Value, placement: Shard, factoring: Factoring) -> Slot:
    """Return the slot that ``S[dim]`` splits in an annotated value: the outermost of the dim that no op blocks."""
    slots = [(value.name, placement.dim, i) for i in range(len(factoring.slots[value.name][placement.dim]))]
    return next((slot for slot in slots if not factoring.is_blocked(slot)), slots[0])


_NONE = -1


@dataclass(slots=True)
class _Search:
    function: Function
    factoring: Factoring
    mesh: DeviceMesh
    graph: SlotGraph = field(init=False)
    targets: TargetSplits = field(init=False)
    rounds: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """The annotated values of each round, each with a mesh axis."""
    is_fixed: npt.NDArray[np.bool_] = field(init=False)
    """By axis and number of a value, whether propagation does not split it: it is annotated, or its only user is an
    annotation without a split."""
    sized_by: dict[tuple[int, Slot], str] = field(default_factory=dict)
    """The location of the annotation that gave sizes or a rule for a class along an axis."""
    annotations: dict[str, Op] = field(default_factory=dict)
    """The first annotation of each input."""
    partition_rules: dict[tuple[int, Slot], Divide] = field(default_factory=dict)
    """The rule, in blocks, by shares or at multiples, of classes along an axis whose annotation has no sizes."""
    valid: dict[tuple[tuple[Placement, ...], tuple[int, ...]], tuple[Placement, ...]] = field(default_factory=dict)
    """Placements that fit tensors, by their text and the tensor's shape."""

    def __post_init__(self) -> None:
        axes, values = len(self.mesh.shape), len(self.factoring.slots)
        self.graph = SlotGraph.of(self.factoring)
        slots, edges, annotation_of = (np.full((axes, values), _NONE, dtype=np.int64) for _ in range(3))
        units: list[dict[Slot, Cut]] = [{} for _ in range(axes)]
        inputs = frozenset(item.value.name for item in self.function.inputs)
        self.targets = TargetSplits(
            self.function, self.factoring, self.graph, slots, edges, annotation_of, units, inputs
        )
        self.is_fixed = np.zeros((axes, values), dtype=bool)

    def pin(self, op: Op) -> None:
        """Add one annotation."""
        value, layout = op.results[0], op.placements
        key = layout, value.tensor.shape
        placements = self.valid.get(key)
        if placements is None:
            placements = self.valid[key] = validate_annotation(layout, self.mesh, value.tensor.shape, op.location)
        self._reject_contradiction(op, layout)
        targets, numbers = self.targets, self.factoring.classes.numbers
        targets.pinned[value.name] = op
        targets.annotations.append(op)
        number = numbers[value.name]
        for axis, placement in enumerate(placements):
            if placement == R and op.attrs.get("open"):
                continue
            self.is_fixed[axis, number] = True
            if isinstance(placement, Partial):
                targets.partial[value.name, axis] = placement
                # The producer leaves its result partial too, rather than reduce it first.
                if not self._is_input(source := op.operands[0].name) and source not in targets.pinned:
                    targets.partial[source, axis] = placement
            if placement == R and self._is_sum_for(op):
                self.is_fixed[axis, numbers[op.operands[0].name]] = True
            if not isinstance(placement, Shard):
                continue
            slot = annotated_slot(value, placement, self.factoring)
            self._set_units(slot, axis, placement, op.location)
            targets.slots[axis, number] = self.factoring.classes.index(slot)
            targets.annotation_of[axis, number] = len(targets.annotations) - 1
            self.rounds[_round(op)].append((axis, number))

    def _is_sum_for(self, op: Op) -> bool:
        """Return whether an annotated value is a sum over a factor of its op, and has no other user."""
        source = op.operands[0].name
        number = self.factoring.classes.numbers[source]
        # Its definition and the annotation.
        if self._is_input(source) or self.graph.uses[number] != 2:
            return False
        atoms = self.factoring.atoms[self.graph.first_uses[number]]
        return any(atom.kind not in (PARALLEL, BLOCKED, WINDOW) for atom in atoms)

    def _reject_contradiction(self, op: Op, layout: tuple[Placement, ...]) -> None:
        source = op.operands[0].name
        if not self._is_input(source):
            return
        other = self.annotations.setdefault(source, op)
        if (before := other.placements) != layout:
            raise AnnotationError(
                f"%{source} is annotated {print_placements(before)!r} at {other.location} and "
                f"{print_placements(layout)!r} here",
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

    def _run(self, queue: Sequence[tuple[int, int]]) -> None:
        """Propagate breadth first: all splits at one distance from their annotations at once.

        Of the splits that reach a value in one step the first counts: in the order of the splits that they come from,
        and for one of those in the order of the ops that use it.
        """
        targets, graph, count = self.targets, self.graph, len(self.factoring.slots)
        slots, edges, annotation_of = (a.reshape(-1) for a in (targets.slots, targets.edges, targets.annotation_of))
        is_fixed = self.is_fixed.reshape(-1)
        # A value with an axis is one number.
        reached = np.array([axis * count + value for axis, value in queue], dtype=np.int64)
        while len(reached):
            rows, found, others = graph.neighbors(slots[reached])
            sources = reached[rows]
            is_passed = np.ones(len(found), dtype=bool)
            if graph.has_windows:
                for number in np.flatnonzero(graph.is_window(found)).tolist():
                    source, is_prefix = int(sources[number]), graph.is_prefix(found[number])
                    is_passed[number] = self._cross(source // count, int(slots[source]), int(others[number]), is_prefix)
            values = sources - sources % count + graph.value_of[others]
            is_new = np.flatnonzero(is_passed & (slots[values] < 0) & ~is_fixed[values])
            _, first = np.unique(values[is_new], return_index=True)
            chosen = is_new[np.sort(first)]
            reached = values[chosen]
            slots[reached], edges[reached] = others[chosen], found[chosen]
            annotation_of[reached] = annotation_of[sources[chosen]]

    def refine(self) -> None:
        """Where values are split along several axes by one class, nest the cuts of these axes.

        Sizes given by the user stay; the other axes divide within them, in the order of the mesh. If sizes of two
        annotations are not nested, values between them keep the split of the first axis only.
        """
        slots, classes = self.targets.slots, self.factoring.classes
        is_shared = np.zeros(slots.shape[1], dtype=bool)
        for first, second in combinations(slots, 2):
            is_shared |= (first == second) & (first >= 0)
        members: dict[Slot, list[int]] = defaultdict(list)
        for value in np.flatnonzero(is_shared).tolist():
            column = slots[:, value].tolist()
            for slot in {slot for slot in column if slot >= 0 and column.count(slot) > 1}:
                members[classes.representative(slot)].append(value)
        for class_, values in members.items():
            shared = {axis for value in values for axis in self._axes_of(value, class_)}
            cuts: list[Cut] = []
            for axis in sorted(shared, key=lambda a: (not self._is_sized(a, class_), a)):
                cut = self._refine_class(class_, axis, cuts)
                if all(is_nested(other, cut) for other in cuts):
                    cuts.append(cut)
                    continue
                for value in values:
                    if classes.names[value] not in self.targets.pinned and axis in self._axes_of(value, class_):
                        slots[axis, value] = _NONE

    def _axes_of(self, value: int, class_: Slot) -> list[int]:
        """Return the axes along which a value is split by a class."""
        splits = enumerate(self.targets.slots[:, value].tolist())
        return [axis for axis, s in splits if s >= 0 and self.factoring.classes.representative(s) == class_]

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

    def _cross(self, axis: int, slot: int, other: int, is_prefix: bool) -> bool:
        """Return whether a split passes a window; slots are given by index.

        The dim on the other side is cut in the proportions of the user's cut. Elements must not move when others are
        appended to a symbolic number of them: then only a cut with sizes passes, which holds for all their numbers.
        """
        classes, units = self.factoring.classes, self.targets.units[axis]
        source, target = classes.representative(slot), classes.representative(other)
        sized_at, size = self.sized_by.get((axis, source)), self.factoring.size(target)
        symbol, factor = multiple_of_symbol(self.factoring.size(source)) or (None, 0)
        is_passed = not (is_prefix and is_symbolic(size)) or (sized_at is not None and factor == 1)
        if not is_passed or sized_at is None or target in units or not units[source].is_block:
            return is_passed
        (segment,) = units[source].segments
        if is_prefix and symbol is not None:
            units[target] = Cut.of(*(evaluate_size(n, {symbol.name: size}) for n in segment.sizes))
        else:
            units[target] = Cut.of(*scale_sizes(segment.sizes, size))
        self.sized_by[axis, target] = sized_at
        return True


def _round(op: Op) -> int:
    number = op.attrs.get("round", 0)
    return number if isinstance(number, int) else 0
