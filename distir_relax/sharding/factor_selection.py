"""Factor selection: split each op, mesh axis by mesh axis, along the factor that costs the least communication.

Or along none: then every device computes everything. Communication is that of reshard plans (`sharding.reshard_plan`),
computation that of the roofline (`cost.roofline`). Names are those of the inlined program, for which factors and
annotations are propagated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from distir_relax.cost.roofline import FLOPS_PER_BYTE, flops
from distir_relax.ir import Instance, Op, Value
from distir_relax.layout import (
    Cut,
    DeviceMesh,
    Partial,
    Placement,
    R,
    Shard,
    block_bounds,
    is_always,
    is_symbolic,
    minimum,
)
from distir_relax.layout.partition import balanced, cut_in_elements, is_nested
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, Ring, Routing, Trait, lookup
from distir_relax.sharding.annotation_propagation import Split, TargetSplits
from distir_relax.sharding.components import IntArray
from distir_relax.sharding.expert_routing import is_exchanged, routed_placements
from distir_relax.sharding.factor_split import list_instances
from distir_relax.sharding.factors import Atom, Factoring, Slot
from distir_relax.sharding.reshard_plan import cost

Placed = tuple[Placement, ...]
_TURN = 1 << 18
"""The bytes that could be sent in the time of the additional ops of a turn (`Split.ring`)."""


@dataclass(slots=True)
class FactorSelector:
    """Selects factors, given the splits that annotations request."""

    factoring: Factoring
    targets: TargetSplits
    mesh: DeviceMesh
    grouped: frozenset[str] = frozenset()
    """Operands of grouped products (`expert_routing.grouped_operands`); rows of other values are never sent."""
    ring: str = "auto"
    """Whether an op may be split along two factors on one axis (`Split.ring`): ``off``, ``on`` wherever it is possible,
    or ``auto``, where it costs less."""
    repeated: Mapping[str, int] = field(default_factory=dict)
    """The bytes of the smallest values that values are repetitions of: these are gathered instead."""
    _shards: dict[tuple[str, int, Split], Placement] = field(default_factory=dict)
    """Cache of `shard`."""
    _choices: dict[object, tuple[list[Placed], list[Placed]]] = field(default_factory=dict)
    """Cache of `choose`: layers repeat, and so do updates of weights."""
    _requests: list[int] | None = None
    """Cache of `_request_numbers`."""
    _columns: IntArray | None = None
    """Cache of `_target_columns`."""
    _layouts: dict[bytes, Placed] = field(default_factory=dict)
    """Cache of `target_layout`, by the value's row of `_target_columns`."""
    _atom_ids: dict[int, int] = field(default_factory=dict)
    """Cache of `_atoms_id`, by identity."""
    _ids: dict[object, int] = field(default_factory=dict)

    def target_layout(self, name: str) -> Placed:
        """Return the layout that annotations request for a value."""
        if self.factoring.sizes:
            # Values of equal slots may have other symbolic sizes.
            return self._layout_of(name)
        key = self._target_columns()[self.factoring.classes.numbers[name]].tobytes()
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout_of(name)
        return layout

    def _layout_of(self, name: str) -> Placed:
        splits, partial = self.targets.splits(name), self.targets.partial
        return tuple(
            partial.get((name, axis), R if s is None else self.shard(name, axis, s)) for axis, s in enumerate(splits)
        )

    def shard(self, name: str, axis: int, split: Split) -> Placement:
        """Return the placement of a value split along an axis, with the cut of its class; R if no cut expresses it."""
        key = (name, axis, split)
        if key not in self._shards:
            slot = (name, *split)
            outer, inner = self.factoring.around(slot)
            units = self._units(axis, slot)
            is_expressible = len(units.segments) == 1 or not is_symbolic(outer)
            self._shards[key] = Shard(split[0], cut_in_elements(units, outer, inner)) if is_expressible else R
        return self._shards[key]

    def choose(
        self, number: int, op: Op, operands: Sequence[Value], available: Sequence[Sequence[Placed]]
    ) -> tuple[list[Placed], list[Placed]]:
        """Select the layouts of an op's operands and results; `operands` have their current layouts.

        `available` are further layouts of each operand that exist already, and cost nothing.
        """
        requests, numbers = self._request_numbers(), self.factoring.classes.numbers
        key = (
            op.name, tuple(op.attrs.items()), op.results[0].name in self.grouped,
            self._atoms_id(self.factoring.atoms[number]),
            tuple([(v.type, requests[numbers[v.name]]) for v in (*op.operands, *op.results)]),
            tuple([v.dtensor.placements for v in operands]), tuple(map(tuple, available)),
            tuple([self.repeated.get(v.name) for v in op.operands]),
        )  # fmt: skip
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._choose(number, op, operands, available)
        return choice

    def _choose(
        self, number: int, op: Op, operands: Sequence[Value], available: Sequence[Sequence[Placed]]
    ) -> tuple[list[Placed], list[Placed]]:
        needs: list[list[Placement]] = [[] for _ in op.operands]
        gives: list[list[Placement]] = [[] for _ in op.results]
        wishes = [self.target_layout(v.name) for v in op.results]
        work = _work(op)
        for axis in range(len(self.mesh.shape)):
            routed = self._routed(number, op, axis, operands, wishes, needs, gives)
            need, give = routed or self._factor(number, op, axis, work, operands, available, wishes, needs, gives)
            for have, placement in zip((*needs, *gives), (*need, *give), strict=True):
                have.append(placement)
        return [tuple(need) for need in needs], [tuple(give) for give in gives]

    def instance_keys(self, entry: Instance) -> dict[int, int]:
        """Return a number for each call of the program, by identity, given its entry function.

        It is equal for calls of one function with the same requested layouts: if their operands have equal layouts too,
        so have all their values.
        """
        atoms = np.array([self._atoms_id(atoms) for atoms in self.factoring.atoms], dtype=np.int64)
        instances = list_instances(entry)
        keys: dict[int, int] = {id(entry): 0}
        for number in range(1, len(instances)):
            if id(instances[number][0]) not in keys:
                self._number_calls(number, instances, atoms, keys)
        return keys

    def _number_calls(
        self, number: int, instances: Sequence[Sequence[Instance]], atoms: IntArray, keys: dict[int, int]
    ) -> None:
        """Add the keys of the instances of function `number`, after those that they call."""
        equal, body = instances[number], self.factoring.bodies[number]
        places = [place for place, inner in enumerate(equal[0].ops) if isinstance(inner, Instance)]
        for place in places:
            inner = equal[0].ops[place]
            assert isinstance(inner, Instance)
            if id(inner) not in keys:
                callee = next(n for n, others in enumerate(instances) if others[0].function is inner.function)
                self._number_calls(callee, instances, atoms, keys)
        calls = [[keys[id(instance.ops[place])] for place in places] for instance in equal]
        targets = self._target_columns()[body.values].reshape(len(equal), -1)
        rows = np.hstack([targets, atoms[body.numbers], np.array(calls, dtype=np.int64).reshape(len(equal), -1)])
        for instance, row in zip(equal, rows, strict=True):
            keys[id(instance)] = self._ids.setdefault(("instance", number, row.tobytes()), len(self._ids))

    def _target_columns(self) -> IntArray:
        """Return numbers for each value, equal for values of equal slots and requested layouts."""
        if self._columns is not None:
            return self._columns
        classes, targets = self.factoring.classes, self.targets
        columns = [self.factoring.dims_id]
        for axis, slots in enumerate(targets.slots):
            columns.append(np.where(slots < 0, -1, slots - classes.firsts[:-1]))
            roots, inverse = np.unique(classes.roots[slots[slots >= 0]], return_inverse=True)
            cuts = [self._units(axis, classes.representative(root)) for root in roots.tolist()]
            cut_ids = np.array([self._ids.setdefault(cut, len(self._ids)) for cut in cuts], dtype=np.int64)
            columns.append(np.full(len(slots), -1, dtype=np.int64))
            columns[-1][slots >= 0] = cut_ids[inverse]
        if targets.partial:
            partial = np.full((len(targets.slots), len(columns[0])), -1, dtype=np.int64)
            for (name, axis), reduction in targets.partial.items():
                partial[axis, classes.numbers[name]] = self._ids.setdefault(reduction, len(self._ids))
            columns += list(partial)
        self._columns = np.stack(columns, axis=-1)
        return self._columns

    def _atoms_id(self, atoms: tuple[Atom, ...]) -> int:
        """Return a number that is equal for equal atoms, which the factoring keeps alive."""
        result = self._atom_ids.get(id(atoms))
        if result is None:
            result = self._atom_ids[id(atoms)] = self._ids.setdefault(("atoms", atoms), len(self._ids))
        return result

    def _request_numbers(self) -> list[int]:
        """Return a number for each value: equal for those of equal slots, cuts of their classes, and requested layouts.

        A class without a cut is cut into balanced parts of its size.
        """
        if self._requests is None:
            classes = self.factoring.classes
            counts = np.diff(classes.firsts)
            is_slot = np.arange(counts.max(initial=0)) < counts[:, None]
            columns = [self._target_columns()]
            for units in self.targets.units:
                cuts = np.full(len(classes.roots), -1, dtype=np.int64)
                for class_, cut in units.items():
                    cuts[classes.index(class_)] = self._ids.setdefault(cut, len(self._ids))
                columns.append(np.full(is_slot.shape, -1, dtype=np.int64))
                columns[-1][is_slot] = cuts[classes.roots]
            rows = np.hstack(columns)
            data, width = rows.tobytes(), rows.itemsize * rows.shape[1]
            keys = (("request", data[start : start + width]) for start in range(0, len(data), width))
            self._requests = [self._ids.setdefault(key, len(self._ids)) for key in keys]
        return self._requests

    def _units(self, axis: int, slot: Slot) -> Cut:
        class_ = self.factoring.classes[slot]
        units = self.targets.units[axis]
        if class_ not in units:
            units[class_] = Cut.of(*balanced(self.factoring.size(slot), self.mesh.shape[axis]))
        return units[class_]

    def _routed(
        self,
        number: int,
        op: Op,
        axis: int,
        operands: Sequence[Value],
        wishes: list[Placed],
        needs: list[list[Placement]],
        gives: list[list[Placement]],
    ) -> tuple[list[Placement], list[Placement]] | None:
        """As `_factor`, where rows are routed to their groups along the axis; None where they are not."""
        tensors = (*op.operands, *op.results)
        if lookup(op.name).split.routing is Routing.DISPATCH and op.results[0].name not in self.grouped:
            return None

        def group_shard(index: int) -> Placement:
            atom = next(a for a in self.factoring.atoms[number] if a.name == "group")
            place = atom.places[index]
            return R if place is None else self.shard(tensors[index].name, axis, place)

        def sendable(groups: Placement) -> bool:
            return not is_exchanged(needs[0], gives[0]) and self._is_blocks(op.operands[-1:], [groups], [needs[-1]])

        have = [v.dtensor.placements[axis] for v in operands]
        return routed_placements(op, have, wishes[0][axis], group_shard, sendable)

    def _factor(
        self,
        number: int,
        op: Op,
        axis: int,
        work: float,
        operands: Sequence[Value],
        available: Sequence[Sequence[Placed]],
        wishes: list[Placed],
        needs: list[list[Placement]],
        gives: list[list[Placement]],
    ) -> tuple[list[Placement], list[Placement]]:
        """Select the placements of the op's operands and results along one axis; `work` is its computation.

        If all operands are split along one factor already, the op is split along it: gathering would undo what the
        annotations request. Otherwise the least cost wins, bytes moved plus work done; ties favor a split. Of values
        that are also split along other axes, only the fraction on the devices of this axis is moved and computed.
        """
        tensors = (*op.operands, *op.results)
        count = len(operands)
        have = [v.dtensor.placements[axis] for v in operands]
        layouts = [*(v.dtensor.placements for v in operands), *wishes]
        shares = [self._fraction((*p, *q[axis + 1 :]), axis) for p, q in zip((*needs, *gives), layouts, strict=True)]
        entry = lookup(op.name, op.location)
        split = entry.split
        best: tuple[tuple[bool, float], list[Placement], list[Placement]] | None = None
        device_work = work * min(shares, default=1.0)
        candidates: list[Atom | None] = [a for a in self.factoring.atoms[number] if a.kind != BLOCKED]
        targets = [*have, *(target_layout[axis] for target_layout in wishes)]
        of_algorithms = [a for a in candidates if a and a.name in split.algorithms]
        # An updated value stays where it is; where an annotation has it, others must agree with that.
        stays = entry.updates and op.operands[0].name not in self.targets.pinned
        is_asked = any(self._is_useful(a, axis, tensors, targets) for a in of_algorithms)
        # If an op with several algorithms is split, another that divides it evenly may cost less.
        others = [a for a in of_algorithms if is_asked and a.size % self.mesh.shape[axis] == 0]
        rings = list(self._rings(self.factoring.atoms[number], split.ring, tensors, (*needs, *gives)))
        for atom, ring in [*((a, None) for a in candidates), *rings, (None, None)]:
            if atom and not self._is_useful(atom, axis, tensors, targets) and atom not in others:
                continue
            placed = self._placed(atom, axis, tensors, count)
            earlier_axes = (*needs, *gives)
            if atom and stays and placed[0] != have[0]:
                continue
            if atom and not all(
                place is None or isinstance(p, Shard) for place, p in zip(atom.places, placed, strict=True)
            ):
                continue
            if not all(is_compatible(p, before) for p, before in zip(placed, earlier_axes, strict=True)):
                continue
            if (
                atom
                and (atom.name in split.positional or atom.kind == WINDOW)
                and not self._is_blocks(tensors, placed, earlier_axes)
            ):
                continue
            if atom and atom.is_prefix and not self._is_in_place(tensors, placed, earlier_axes):
                continue
            ends = (*have, *placed[count:]), (*placed[:count], *(target_layout[axis] for target_layout in wishes))
            is_available = [
                any(layout[: axis + 1] == (*before, p) for layout in choices)
                for choices, before, p in zip(available, needs, placed[:count], strict=True)
            ]
            costs = [0.0 if free else share for free, share in zip_longest(is_available, shares, fillvalue=False)]
            moves = sum(cost * self._cost(v, p, n, axis) for cost, v, p, n in zip(costs, tensors, *ends, strict=True))
            if atom and atom.kind == WINDOW:
                moves += sum(
                    share * atom.reach * v.tensor.bytes / atom.size
                    for share, v, place in zip(shares, op.operands, atom.places, strict=False)
                    if place is not None
                )
            misaligned = not (atom and have == placed[:count] and any(isinstance(p, Shard) for p in have))
            again = split.work.get(atom.name, 1.0) if atom else 1.0
            own_work = again * device_work / (self.mesh.shape[axis] if atom else 1)
            rank = (misaligned, moves + own_work)
            if ring is not None:
                ranks, sent = self.mesh.shape[axis], zip(ring.are_sent, shares, tensors, strict=True)
                parts = sum(n * share * cost(Shard(0), R, ranks, v.tensor.bytes) for n, share, v in sent)
                turns = _TURN * (ranks - 1)
                rank = (self.ring == "auto", moves + max(parts, ring.ring.work * own_work) + turns)
            if best is None or rank < best[0]:
                best = (rank, placed[:count], placed[count:])
        assert best is not None
        return best[1], best[2]

    def _rings(
        self, atoms: Sequence[Atom], rings: Mapping[str, Ring], tensors: Sequence[Value],
        earlier_axes: Sequence[Sequence[Placement]],
    ) -> Iterator[tuple[Atom, _Turns]]:  # fmt: skip
        """Iterate over pairs of atoms that may be split together, each as one that has the places of both."""
        for name, ring in rings.items() if self.ring != "off" else ():
            first, second = ([a for a in atoms if a.name == n and a.kind != BLOCKED] for n in (name, ring.factor))
            if len(first) != 1 or len(second) != 1 or is_symbolic(tuple(v.tensor.shape for v in tensors)):
                continue
            places = list(zip(first[0].places, second[0].places, strict=True))
            is_split = any(
                isinstance(p, Shard) and place is not None and p.dim == place[0]
                for (_, place), placements in zip(places, earlier_axes, strict=True) for p in placements
            )  # fmt: skip
            if not is_split and not any(one and other for one, other in places):
                joined = tuple(one or other for one, other in places)
                yield Atom(f"{name}, {ring.factor}", PARALLEL, first[0].size, joined), _Turns(ring, second[0])

    def _placed(self, atom: Atom | None, axis: int, tensors: Sequence[Value], count: int) -> list[Placement]:
        """Return the placements of an op's tensors, the first `count` of them operands, if it is split along `atom`."""
        placements: list[Placement] = []
        for t, value in enumerate(tensors):
            place = atom.places[t] if atom else None
            if place is not None:
                placements.append(self.shard(value.name, axis, place))
            elif atom and atom.kind not in (PARALLEL, WINDOW) and t >= count:
                placements.append(Partial(atom.kind))
            else:
                placements.append(R)
        return placements

    def _is_useful(self, atom: Atom, axis: int, tensors: Sequence[Value], targets: Sequence[Placement]) -> bool:
        """Whether some operand is split along the atom already, or some result should be."""
        return any(
            place is not None
            and isinstance(p, Shard)
            and p.dim == place[0]
            and p == self.shard(value.name, axis, place)
            for place, p, value in zip(atom.places, targets, tensors, strict=True)
        )

    def _is_blocks(
        self, tensors: Sequence[Value], placements: Sequence[Placement], earlier_axes: Sequence[Sequence[Placement]]
    ) -> bool:
        """Whether each device has one block of every split dim, in order, given the placements of earlier axes."""
        return all(
            block_bounds([*before, p], p.dim, v.tensor.shape[p.dim], self.mesh.shape) is not None
            for v, p, before in zip(tensors, placements, earlier_axes, strict=True)
            if isinstance(p, Shard)
        )

    def _is_in_place(
        self, tensors: Sequence[Value], placements: Sequence[Placement], earlier_axes: Sequence[Sequence[Placement]]
    ) -> bool:
        """Whether no element moves when others are appended to a symbolic number of them."""
        first, last = (
            block_bounds([*before, p], p.dim, v.tensor.shape[p.dim], self.mesh.shape) or ()
            for v, p, before in zip(tensors, placements, earlier_axes, strict=True)
            if isinstance(p, Shard)
        )
        return not is_symbolic(first) or all(minimum(first[-1], b) == a for a, b in zip(first, last, strict=True))

    def _fraction(self, others: Sequence[Placement], axis: int) -> float:
        """Return the fraction of a value that the devices along `axis` have together."""
        sizes = (*self.mesh.shape[:axis], *self.mesh.shape[axis + 1 :])
        return 1.0 / math.prod(size for size, p in zip(sizes, others, strict=True) if isinstance(p, Shard))

    def _cost(self, value: Value, source: Placement, target: Placement, axis: int) -> float:
        if source == target:
            return 0.0
        size = value.tensor.bytes if target != R else self.repeated.get(value.name, value.tensor.bytes)
        return cost(source, target, self.mesh.shape[axis], size)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Devices that exchange parts of a second factor."""

    ring: Ring
    second: Atom

    @property
    def are_sent(self) -> list[bool]:
        """Whether parts of each operand and result are sent."""
        return [place is not None for place in self.second.places]


def bytes_before_repeats(ops: Iterable[Op]) -> dict[str, int]:
    """Return the bytes of the smallest value that each value is moved from, where these are fewer than its own."""
    found: dict[str, int] = {}
    for op in ops:
        if not op.callee and len(op.operands) == 1 and Trait.MOVES in lookup(op.name, op.location).traits:
            source = op.operands[0]
            size = found.get(source.name, source.tensor.bytes)
            found.update((v.name, size) for v in op.results if is_always(size, "<", v.tensor.bytes))
    return found


def is_compatible(placement: Placement, earlier_axes: Sequence[Placement]) -> bool:
    """Whether a split is nested in those of `earlier_axes` of its dim; true for other placements."""
    if not isinstance(placement, Shard) or placement.cut is None:
        return True
    cuts = (p.cut for p in earlier_axes if isinstance(p, Shard) and p.dim == placement.dim)
    return all(cut is not None and is_nested(cut, placement.cut) for cut in cuts)


def _work(op: Op) -> float:
    """Return the op's computation, as the bytes that could be sent in that time."""
    operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return flops(lookup(op.name, op.location), operands, op.attrs, results) / FLOPS_PER_BYTE
