"""Enumerate the strategies of each op: on each mesh axis, split one factor or replicate the op.

Of a dim of several factors, such as heads and their width, the outermost that all its users can split is split, as by
``S[dim]``. Factor classes are cut evenly, in proportion to device speeds, or as the user's annotations say. A class
that is already cut along an earlier mesh axis is cut within each of its parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from distir_relax.autosharding.heterogeneous import Heterogeneity
from distir_relax.autosharding.partial_sums import linear_groups
from distir_relax.ir import Op, Value
from distir_relax.layout import (
    Cut,
    DeviceMesh,
    Partial,
    Placement,
    R,
    Shard,
    block_bounds,
    intersect,
    is_symbolic,
    typical_value,
)
from distir_relax.layout.partition import cut_in_elements, partition_rule, refine_cut
from distir_relax.layout.validate import validate_annotation
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, lookup
from distir_relax.sharding.annotation_propagation import TargetSplits
from distir_relax.sharding.factor_selection import Placed, is_compatible
from distir_relax.sharding.factors import Atom, Factoring, Slot, is_annotation
from distir_relax.sharding.nonfinite import NonfiniteValues


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One strategy of an op: the layouts of its operands, those of its results, and those in which results are left.

    A result that is a partial sum is left reduced, or partial for a user that accepts it.
    """

    in_layouts: tuple[Placed, ...]
    out_layouts: tuple[Placed, ...]
    final_layouts: tuple[Placed, ...]


@dataclass(slots=True)
class StrategySpace:
    """The strategies of all ops of a program with its calls inlined."""

    factoring: Factoring
    targets: TargetSplits
    mesh: DeviceMesh
    hazards: NonfiniteValues = NonfiniteValues()  # noqa: RUF009 (it is frozen)
    deferrable: frozenset[str] = frozenset()
    """The values that may be left as partial sums (`partial_sums.deferrable_sums`)."""
    ignored: frozenset[int] = frozenset()
    """The numbers of the annotations to ignore."""
    heterogeneity: Heterogeneity = Heterogeneity()  # noqa: RUF009 (it is frozen)
    _final_cache: dict[object, tuple[Placed, ...]] = field(default_factory=dict)
    """Results of `_final_layouts`, by all that they depend on."""
    _slots: dict[tuple[str, int], Slot | None] = field(default_factory=dict)

    def layouts(self, value: Value) -> tuple[Placed, ...]:
        """Return all layouts of a value without a producer, by its name in the inlined program."""
        return self._final_layouts(value, tuple(Partial("sum") if size > 1 else R for size in self.mesh.shape))

    def strategies(self, number: int, op: Op) -> tuple[OpStrategy, ...]:
        """Return the strategies of the op of that number."""
        if is_annotation(op):
            layouts = self.layouts(op.results[0]) if number in self.ignored else (self.annotated_layout(op),)
            return tuple(OpStrategy((layout,), (layout,), (layout,)) for layout in layouts)
        tensors = (*op.operands, *op.results)
        atoms = [a for a in self.factoring.atoms[number] if a.kind != BLOCKED and self._is_splittable(a, tensors)]
        if lookup(op.name, op.location).split.routing is not None:
            atoms = []
        strategies: dict[tuple[tuple[Placed, ...], tuple[Placed, ...]], OpStrategy] = {}
        linear = list(linear_groups(op, self.deferrable, self.hazards))
        choices = [*atoms, *linear, None]
        for chosen in itertools.product(*(choices if size > 1 else [None] for size in self.mesh.shape)):
            op_layouts = self._op_layouts(number, op, chosen)
            if op_layouts is None:
                continue
            in_layouts, out_layouts = op_layouts[: len(op.operands)], op_layouts[len(op.operands) :]
            for final_layouts in itertools.product(*map(self._final_layouts, op.results, out_layouts)):
                strategies.setdefault((in_layouts, final_layouts), OpStrategy(in_layouts, out_layouts, final_layouts))
        return tuple(strategies.values())

    def annotated_layout(self, op: Op) -> Placed:
        """Return the layout that an annotation asks for, with partial sums reduced."""
        value = op.results[0]
        annotated = validate_annotation(op.placements, self.mesh, value.tensor.shape, op.location)
        splits = self.targets.splits(value.name)
        layout: list[Placement] = []
        for axis, (placement, split) in enumerate(zip(annotated, splits, strict=True)):
            is_split = isinstance(placement, Shard) and split is not None
            layout.append(self._shard((value.name, *split), axis, {}) if is_split and split is not None else R)
        return tuple(layout)

    def _op_layouts(
        self, number: int, op: Op, chosen: Sequence[Atom | frozenset[int] | None]
    ) -> tuple[Placed, ...] | None:
        """Return the layouts of operands and results, None if they are impossible.

        On each axis the op is split along an atom, takes the operands of those numbers as partial sums, or is
        replicated.
        """
        tensors = (*op.operands, *op.results)
        positional = lookup(op.name, op.location).split.positional
        layouts: list[list[Placement]] = [[] for _ in tensors]
        cuts: dict[Slot, list[Cut]] = {}
        for axis, atom in enumerate(chosen):
            axis_placements: list[Placement] = []
            if isinstance(atom, Atom) and not self._reduces_work(atom, tensors, axis, cuts):
                return None
            if isinstance(atom, frozenset):
                for t, placements in enumerate(layouts):
                    placements.append(Partial("sum") if t in atom or t >= len(op.operands) else R)
                continue
            for t, value in enumerate(tensors):
                slot = atom.places[t] if atom else None
                if slot is not None:
                    axis_placements.append(self._shard((value.name, *slot), axis, cuts))
                elif atom and atom.kind not in (PARALLEL, WINDOW) and t >= len(op.operands):
                    axis_placements.append(Partial(atom.kind))
                else:
                    axis_placements.append(R)
            if not all(is_compatible(p, placements) for p, placements in zip(axis_placements, layouts, strict=True)):
                return None
            in_blocks = atom is not None and (atom.name in positional or atom.kind == WINDOW)
            if in_blocks and not self._is_blocks(tensors, axis_placements, layouts):
                return None
            if atom is not None:
                self._record_cuts(atom, tensors, axis, cuts)
            for placements, placement in zip(layouts, axis_placements, strict=True):
                placements.append(placement)
        return tuple(map(tuple, layouts))

    def _final_layouts(self, value: Value, layout: Placed) -> tuple[Placed, ...]:
        """Return the layouts in which a value may be left: each partial sum reduced, reduced and split, or partial."""
        if not any(isinstance(p, Partial) for p in layout):
            return (layout,)
        slots = [slot for dim in range(len(value.tensor.shape)) if (slot := self._slot(value.name, dim)) is not None]
        # Values with equal cuts have equal final layouts.
        factoring = self.factoring
        cuts = [(slot[1], factoring.classes[slot], factoring.size(slot), *factoring.around(slot)) for slot in slots]
        key = (layout, tuple(cuts), value.name in self.deferrable)
        if key not in self._final_cache:
            self._final_cache[key] = tuple(self._enumerate_final(value, layout, slots))
        return self._final_cache[key]

    def _enumerate_final(self, value: Value, layout: Placed, slots: Sequence[Slot]) -> Iterator[Placed]:
        """Yield the layouts of `_final_layouts`; `slots` are those of the value that can be cut."""
        axes = [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]
        partial = (Partial("sum"),) if value.name in self.deferrable else ()
        existing_cuts = self._cuts_in(value, layout)
        for chosen in itertools.product([None, *slots, *partial], repeat=len(axes)):
            final: list[Placement] = [R if axis in axes else p for axis, p in enumerate(layout)]
            cuts = {owner: list(class_cuts) for owner, class_cuts in existing_cuts.items()}
            if all(self._reduce_axis(slot, axis, layout, final, cuts) for axis, slot in zip(axes, chosen, strict=True)):
                yield tuple(final)

    def _reduce_axis(
        self, slot: Slot | Partial | None, axis: int, layout: Placed, final: list[Placement],
        cuts: dict[Slot, list[Cut]],
    ) -> bool:  # fmt: skip
        """Reduce a partial sum along an axis, reduce and split it, or leave it partial; return whether it can be."""
        if slot is None:
            return True
        if isinstance(slot, Partial):
            final[axis] = slot
            return layout[axis] == slot
        # Ops expect the axes that cut a dim in their order; another order would need a reshard.
        is_cut_later = any(isinstance(p, Shard) and p.dim == slot[1] for p in layout[axis + 1 :])
        if is_cut_later or not self._reduces_part(slot, axis, cuts):
            return False
        final[axis] = self._shard(slot, axis, cuts)
        cuts.setdefault(self.factoring.classes[slot], []).append(self._units(slot, axis, cuts))
        return is_compatible(final[axis], [p for i, p in enumerate(final) if i != axis])

    def _slot(self, name: str, dim: int) -> Slot | None:
        """Return the slot that ``S[dim]`` cuts: the outermost one of the dim that every user can split."""
        if (name, dim) not in self._slots:
            slots = ((name, dim, i) for i in range(len(self.factoring.slots[name][dim])))
            self._slots[name, dim] = next(filter(self._is_cuttable, slots), None)
        return self._slots[name, dim]

    def _is_cuttable(self, slot: Slot) -> bool:
        """Return whether every user can split a slot; one of a symbolic number of repetitions cannot be split."""
        outer, _ = self.factoring.around(slot)
        return typical_value(self.factoring.size(slot)) > 1 and not (
            self.factoring.is_blocked(slot) or is_symbolic(outer)
        )

    def _is_splittable(self, atom: Atom, tensors: Sequence[Value]) -> bool:
        """Return whether an atom is the slot that is cut in each dim that it indexes; growing dims are not cut."""
        places = [(v.name, *index) for v, index in zip(tensors, atom.places, strict=True) if index is not None]
        return (
            bool(places)
            and not atom.is_prefix
            and all(self._slot(name, dim) == (name, dim, slot) for name, dim, slot in places)
        )

    def _cuts_in(self, value: Value, layout: Placed) -> dict[Slot, list[Cut]]:
        """Return the cuts that a layout makes in the classes of a value's dims."""
        cuts: dict[Slot, list[Cut]] = {}
        for axis, placement in enumerate(layout):
            if isinstance(placement, Shard):
                slot = self._slot(value.name, placement.dim)
                if slot is not None:
                    units = self._units(slot, axis, cuts)
                    cuts.setdefault(self.factoring.classes[slot], []).append(units)
        return cuts

    def _record_cuts(self, atom: Atom, tensors: Sequence[Value], axis: int, cuts: dict[Slot, list[Cut]]) -> None:
        """Record how the classes of an atom are cut along an axis, for later axes."""
        new: dict[Slot, Cut] = {}
        for value, index in zip(tensors, atom.places, strict=True):
            if index is not None:
                slot = (value.name, *index)
                new[self.factoring.classes[slot]] = self._units(slot, axis, cuts)
        for owner, cut in new.items():
            cuts.setdefault(owner, []).append(cut)

    def _shard(self, slot: Slot, axis: int, cuts: dict[Slot, list[Cut]]) -> Shard:
        return _shard_of(slot[1], self._units(slot, axis, cuts), *self.factoring.around(slot))

    def _units(self, slot: Slot, axis: int, cuts: dict[Slot, list[Cut]]) -> Cut:
        """Return the cut of a slot's class along an axis, given the `cuts` along other axes."""
        owner, ranks = self.factoring.classes[slot], self.mesh.shape[axis]
        if (annotated := self.targets.units[axis].get(owner)) is not None:
            return annotated
        shares = self.heterogeneity.shares[axis] if self.heterogeneity.shares else ()
        return _cut_units(self.factoring.size(slot), tuple(cuts.get(owner, ())), ranks, shares)

    def _reduces_work(self, atom: Atom, tensors: Sequence[Value], axis: int, cuts: dict[Slot, list[Cut]]) -> bool:
        """Return whether splitting an op along an atom on one more axis leaves the largest device less work."""
        slots = ((v.name, *index) for v, index in zip(tensors, atom.places, strict=True) if index is not None)
        return any(self._reduces_part(slot, axis, cuts) for slot in slots)

    def _reduces_part(self, slot: Slot, axis: int, cuts: dict[Slot, list[Cut]]) -> bool:
        """Return whether a cut along an axis reduces the largest part that `cuts` leave of a class, or is annotated.

        Heads of which each device already has one are not cut further: all but one device of the next axis would have
        none. On heterogeneous devices the first need not have the largest part, so the check is skipped.
        """
        owner = self.factoring.classes[slot]
        if owner in self.targets.units[axis] or self.heterogeneity.shares:
            return True
        before = tuple(cuts.get(owner, ()))
        return _largest((*before, self._units(slot, axis, cuts))) < _largest(before, self.factoring.size(slot))

    def _is_blocks(
        self, tensors: Sequence[Value], axis_placements: Sequence[Placement], layouts: Sequence[Sequence[Placement]]
    ) -> bool:
        """Return whether each device has one contiguous block of every split dim, in order."""
        return all(
            block_bounds([*placements, p], p.dim, v.tensor.shape[p.dim], self.mesh.shape) is not None
            for v, p, placements in zip(tensors, axis_placements, layouts, strict=True)
            if isinstance(p, Shard)
        )


@lru_cache(maxsize=1 << 12)
def _largest(cuts: tuple[Cut, ...], size: int = 0) -> int:
    """Return the units that the first, largest, device has of a class with these cuts; `size` if there are none.

    For typical values of symbolic sizes.
    """
    if not cuts:
        return typical_value(size)
    intervals = cuts[0].intervals(0)
    for cut in cuts[1:]:
        intervals = intersect(intervals, cut.intervals(0))
    return typical_value(sum(stop - start for start, stop in intervals))


@lru_cache(maxsize=1 << 12)
def _cut_units(size: int, others: tuple[Cut, ...], ranks: int, shares: tuple[float, ...]) -> Cut:
    """Return a cut of `size` units, by shares or evenly, that divides each part of the other cuts by itself."""
    divide = partition_rule(Shard(0, shares=shares))
    return refine_cut(size, others, ranks, divide) if others else Cut.of(*divide(size, ranks))


@lru_cache(maxsize=1 << 12)
def _shard_of(dim: int, units: Cut, outer: int, inner: int) -> Shard:
    return Shard(dim, cut_in_elements(units, outer, inner))
