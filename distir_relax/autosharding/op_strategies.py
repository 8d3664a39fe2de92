"""How each op can be split: along one factor on each mesh axis, or along none, where every device computes the whole.

Of a dim that is made of several, such as heads and their width, the outermost is split that all ops can bear, as by
``S[dim]``. Classes of dims are cut evenly, by the speed of unlike devices, or as the user's annotations say. Along a
later axis a class that is cut already is cut within each of its parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from distir_relax.autosharding.heterogeneous import Unlike
from distir_relax.autosharding.partial_sums import linear_groups
from distir_relax.ir import Op, Value
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Shard, block_bounds, intersect
from distir_relax.layout.partition import cut_of, dividing, refined
from distir_relax.layout.validate import fit_annotation
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, lookup
from distir_relax.sharding.annotation_propagation import Wanted
from distir_relax.sharding.factor_selection import Placed, divides
from distir_relax.sharding.factors import Atom, Factoring, Slot, is_annotation
from distir_relax.sharding.nonfinite import Hazards


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do an op: how its operands are to lie, how it gives its results, and how these are left lying.

    What is given with a sum pending `rests` with the sum made, or pending for a user that can take it so.
    """

    needs: tuple[Placed, ...]
    gives: tuple[Placed, ...]
    rests: tuple[Placed, ...]


@dataclass(slots=True)
class Space:
    """The ways of all ops of a program with its calls written out."""

    factoring: Factoring
    wanted: Wanted
    mesh: DeviceMesh
    hazards: Hazards = Hazards()  # noqa: RUF009 (it is frozen)
    pending: frozenset[str] = frozenset()
    """The values that may be left with a sum pending (`pending.may_pend`)."""
    free: frozenset[int] = frozenset()
    """The numbers of marks that are left out."""
    unlike: Unlike = Unlike()  # noqa: RUF009 (it is frozen)
    _known: dict[object, tuple[Placed, ...]] = field(default_factory=dict)
    """What `_completed` found, by all that it depends on."""
    _slots: dict[tuple[str, int], Slot | None] = field(default_factory=dict)

    def layouts(self, value: Value) -> tuple[Placed, ...]:
        """All layouts of a value that is taken as it comes, by its name in the program written out."""
        return self._completed(value, tuple(Partial("sum") if size > 1 else R for size in self.mesh.shape))

    def ways(self, number: int, op: Op) -> tuple[Way, ...]:
        """The ways of the op of that number."""
        if is_annotation(op):
            layouts = self.layouts(op.results[0]) if number in self.free else (self.pinned(op),)
            return tuple(Way((lies,), (lies,), (lies,)) for lies in layouts)
        tensors = (*op.operands, *op.results)
        atoms = [a for a in self.factoring.atoms[number] if a.kind != BLOCKED and self._is_cut(a, tensors)]
        if lookup(op.name, op.location).split.routing is not None:
            atoms = []
        found: dict[tuple[tuple[Placed, ...], tuple[Placed, ...]], Way] = {}
        linear = list(linear_groups(op, self.pending, self.hazards))
        choices = [*atoms, *linear, None]
        for chosen in itertools.product(*(choices if size > 1 else [None] for size in self.mesh.shape)):
            placed = self._placed(number, op, chosen)
            if placed is None:
                continue
            needs, gives = placed[: len(op.operands)], placed[len(op.operands) :]
            for rests in itertools.product(*map(self._completed, op.results, gives)):
                found.setdefault((needs, rests), Way(needs, gives, rests))
        return tuple(found.values())

    def pinned(self, op: Op) -> Placed:
        """The layout that an annotation asks for, with its sums made."""
        value = op.results[0]
        asked = fit_annotation(str(op.attrs["placements"]), self.mesh, value.tensor.shape, op.location)
        splits = self.wanted.splits[value.name]
        found: list[Placement] = []
        for axis, (placement, split) in enumerate(zip(asked, splits, strict=True)):
            is_split = isinstance(placement, Shard) and split is not None
            found.append(self._shard((value.name, *split), axis, {}) if is_split and split is not None else R)
        return tuple(found)

    def _placed(self, number: int, op: Op, chosen: Sequence[Atom | frozenset[int] | None]) -> tuple[Placed, ...] | None:
        """How operands and results lie where the op is split along an atom on each axis, or takes operands of those
        numbers with sums pending; None where it cannot be."""
        tensors = (*op.operands, *op.results)
        positional = lookup(op.name, op.location).split.positional
        placed: list[list[Placement]] = [[] for _ in tensors]
        cuts: dict[Slot, list[Cut]] = {}
        for axis, atom in enumerate(chosen):
            row: list[Placement] = []
            if isinstance(atom, Atom) and not self._leaves_less(atom, tensors, axis, cuts):
                return None
            if isinstance(atom, frozenset):
                for t, before in enumerate(placed):
                    before.append(Partial("sum") if t in atom or t >= len(op.operands) else R)
                continue
            for t, value in enumerate(tensors):
                place = atom.places[t] if atom else None
                if place is not None:
                    row.append(self._shard((value.name, *place), axis, cuts))
                elif atom and atom.kind not in (PARALLEL, WINDOW) and t >= len(op.operands):
                    row.append(Partial(atom.kind))
                else:
                    row.append(R)
            if not all(divides(p, before) for p, before in zip(row, placed, strict=True)):
                return None
            in_blocks = atom is not None and (atom.name in positional or atom.kind == WINDOW)
            if in_blocks and not self._is_blocks(tensors, row, placed):
                return None
            if atom is not None:
                self._note(atom, tensors, axis, cuts)
            for before, placement in zip(placed, row, strict=True):
                before.append(placement)
        return tuple(map(tuple, placed))

    def _completed(self, value: Value, gives: Placed) -> tuple[Placed, ...]:
        """The layouts in which a value can be left that is given with sums pending: reduced, reduced and split, or
        pending."""
        if not any(isinstance(p, Partial) for p in gives):
            return (gives,)
        slots = [slot for dim in range(len(value.tensor.shape)) if (slot := self._slot(value.name, dim)) is not None]
        # Values that are cut alike can be left alike.
        factoring = self.factoring
        cuts = [(slot[1], factoring.classes[slot], factoring.size(slot), *factoring.around(slot)) for slot in slots]
        key = (gives, tuple(cuts), value.name in self.pending)
        if key not in self._known:
            self._known[key] = tuple(self._left(value, gives, slots))
        return self._known[key]

    def _left(self, value: Value, gives: Placed, slots: Sequence[Slot]) -> Iterator[Placed]:
        """The layouts of `_completed`; `slots` are those of the value that can be cut."""
        axes = [axis for axis, p in enumerate(gives) if isinstance(p, Partial)]
        stays = (Partial("sum"),) if value.name in self.pending else ()
        before = self._cuts_in(value, gives)
        for chosen in itertools.product([None, *slots, *stays], repeat=len(axes)):
            found: list[Placement] = [R if axis in axes else p for axis, p in enumerate(gives)]
            cuts = {owner: list(some) for owner, some in before.items()}
            if all(self._leaves(slot, axis, gives, found, cuts) for axis, slot in zip(axes, chosen, strict=True)):
                yield tuple(found)

    def _leaves(
        self, slot: Slot | Partial | None, axis: int, gives: Placed, found: list[Placement],
        cuts: dict[Slot, list[Cut]],
    ) -> bool:  # fmt: skip
        """Leave what is given with a sum pending along an axis split, pending or reduced there; whether it can be."""
        if slot is None:
            return True
        if isinstance(slot, Partial):
            found[axis] = slot
            return gives[axis] == slot
        # Ops take what axes cut in their order, so another order would only have to be put right.
        inside = any(isinstance(p, Shard) and p.dim == slot[1] for p in gives[axis + 1 :])
        if inside or not self._divides_more(slot, axis, cuts):
            return False
        found[axis] = self._shard(slot, axis, cuts)
        cuts.setdefault(self.factoring.classes[slot], []).append(self._units(slot, axis, cuts))
        return divides(found[axis], [p for i, p in enumerate(found) if i != axis])

    def _slot(self, name: str, dim: int) -> Slot | None:
        """What ``S[dim]`` cuts of a value: the outermost slot of the dim that every user can bear."""
        if (name, dim) not in self._slots:
            slots = ((name, dim, i) for i in range(len(self.factoring.slots[name][dim])))
            fits = (s for s in slots if not self.factoring.is_blocked(s) and self.factoring.size(s) > 1)
            self._slots[name, dim] = next(fits, None)
        return self._slots[name, dim]

    def _is_cut(self, atom: Atom, tensors: Sequence[Value]) -> bool:
        """Whether an atom is what is cut of each dim in which it stands."""
        places = [(v.name, *place) for v, place in zip(tensors, atom.places, strict=True) if place is not None]
        return bool(places) and all(self._slot(name, dim) == (name, dim, slot) for name, dim, slot in places)

    def _cuts_in(self, value: Value, gives: Placed) -> dict[Slot, list[Cut]]:
        """How the classes of a value's dims are cut already."""
        cuts: dict[Slot, list[Cut]] = {}
        for axis, placement in enumerate(gives):
            if isinstance(placement, Shard):
                slot = self._slot(value.name, placement.dim)
                if slot is not None:
                    units = self._units(slot, axis, cuts)
                    cuts.setdefault(self.factoring.classes[slot], []).append(units)
        return cuts

    def _note(self, atom: Atom, tensors: Sequence[Value], axis: int, cuts: dict[Slot, list[Cut]]) -> None:
        """Keep how the classes of an atom are cut along an axis, for the axes behind."""
        new: dict[Slot, Cut] = {}
        for value, place in zip(tensors, atom.places, strict=True):
            if place is not None:
                slot = (value.name, *place)
                new[self.factoring.classes[slot]] = self._units(slot, axis, cuts)
        for owner, cut in new.items():
            cuts.setdefault(owner, []).append(cut)

    def _shard(self, slot: Slot, axis: int, cuts: dict[Slot, list[Cut]]) -> Shard:
        return _sharded(slot[1], self._units(slot, axis, cuts), *self.factoring.around(slot))

    def _units(self, slot: Slot, axis: int, cuts: dict[Slot, list[Cut]]) -> Cut:
        """How the units of a slot's class are cut along an axis, where they are cut by `cuts` along others."""
        owner, ranks = self.factoring.classes[slot], self.mesh.shape[axis]
        if (asked := self.wanted.units[axis].get(owner)) is not None:
            return asked
        shares = self.unlike.shares[axis] if self.unlike.shares else ()
        return _divided(self.factoring.size(slot), tuple(cuts.get(owner, ())), ranks, shares)

    def _leaves_less(self, atom: Atom, tensors: Sequence[Value], axis: int, cuts: dict[Slot, list[Cut]]) -> bool:
        """Whether an op that is split along an atom, too, on an axis has less of it to do on any device."""
        slots = ((v.name, *place) for v, place in zip(tensors, atom.places, strict=True) if place is not None)
        return any(self._divides_more(slot, axis, cuts) for slot in slots)

    def _divides_more(self, slot: Slot, axis: int, cuts: dict[Slot, list[Cut]]) -> bool:
        """Whether the largest part that `cuts` leave of a class is made smaller along an axis, or the user wants it so.

        Heads of which each device has one already are not cut any more: all but one of the next axis would have none.
        Of unlike devices the first need not have the largest part, so these are not asked.
        """
        owner = self.factoring.classes[slot]
        if owner in self.wanted.units[axis] or self.unlike.shares:
            return True
        before = tuple(cuts.get(owner, ()))
        return _largest((*before, self._units(slot, axis, cuts))) < _largest(before, self.factoring.size(slot))

    def _is_blocks(
        self, tensors: Sequence[Value], row: Sequence[Placement], placed: Sequence[Sequence[Placement]]
    ) -> bool:
        """Whether each device holds one block of every split dim, in order."""
        return all(
            block_bounds([*before, p], p.dim, v.tensor.shape[p.dim], self.mesh.shape) is not None
            for v, p, before in zip(tensors, row, placed, strict=True)
            if isinstance(p, Shard)
        )


@lru_cache(maxsize=1 << 12)
def _largest(cuts: tuple[Cut, ...], size: int = 0) -> int:
    """What the first device, which has most, holds of something that is cut so, of all of `size` where it is not."""
    if not cuts:
        return size
    held = cuts[0].intervals(0)
    for cut in cuts[1:]:
        held = intersect(held, cut.intervals(0))
    return sum(stop - start for start, stop in held)


@lru_cache(maxsize=1 << 12)
def _divided(size: int, others: tuple[Cut, ...], ranks: int, shares: tuple[float, ...]) -> Cut:
    """A cut of so many units, by shares or evenly, that divides what each of the others leaves by itself."""
    divide = dividing(Shard(0, shares=shares))
    return refined(size, others, ranks, divide) if others else Cut.of(*divide(size, ranks))


@lru_cache(maxsize=1 << 12)
def _sharded(dim: int, units: Cut, outer: int, inner: int) -> Shard:
    return Shard(dim, cut_of(units, outer, inner))
