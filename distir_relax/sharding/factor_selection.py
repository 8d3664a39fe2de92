"""The factor that each op is split along, mesh axis by mesh axis: the one that moves the fewest bytes.

Or none: then every device computes the whole. What redistributions send is counted as their plans do
(`sharding.redistribute`), and what an op computes as the simulator does (`cost.roofline`). Names are those of the
program with calls written out, over which factors and annotations are spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from distir_relax.cost.roofline import FLOPS_PER_BYTE, flops
from distir_relax.ir import Instance, Op, Value
from distir_relax.layout import Cut, DeviceMesh, Partial, Placement, R, Shard, block_bounds
from distir_relax.layout.partition import balanced, cut_of, nested
from distir_relax.ops import BLOCKED, PARALLEL, WINDOW, Routing, lookup
from distir_relax.sharding.annotation_propagation import Split, Wanted
from distir_relax.sharding.expert_routing import is_sent, routed
from distir_relax.sharding.factors import Atom, Factoring, Slot
from distir_relax.sharding.reshard_plan import cost

Placed = tuple[Placement, ...]


@dataclass(slots=True)
class FactorChoice:
    """Chooses factors, given what annotations ask for."""

    factoring: Factoring
    wanted: Wanted
    mesh: DeviceMesh
    worked: frozenset[str] = frozenset()
    """The values that a product of groups is made of (`routing.worked_on`): rows of others are sent nowhere."""
    _shards: dict[tuple[str, int, Split], Shard] = field(default_factory=dict)
    """What was found by `shard`: a class is cut once."""
    _numbers: dict[object, int] = field(default_factory=dict)
    _units_numbers: dict[tuple[Slot, int], int] = field(default_factory=dict)

    def wish(self, name: str) -> Placed:
        """How the value is to lie."""
        splits, pending = self.wanted.splits[name], self.wanted.pending
        return tuple(
            pending.get((name, axis), R if s is None else self.shard(name, axis, s)) for axis, s in enumerate(splits)
        )

    def shard(self, name: str, axis: int, split: Split) -> Shard:
        """The value split along an axis, in the units of the class."""
        key = (name, axis, split)
        if key not in self._shards:
            slot = (name, *split)
            outer, inner = self.factoring.around(slot)
            self._shards[key] = Shard(split[0], cut_of(self._units(axis, slot), outer, inner))
        return self._shards[key]

    def choose(
        self, number: int, op: Op, operands: Sequence[Value], made: Sequence[Sequence[Placed]]
    ) -> tuple[list[Placed], list[Placed]]:
        """How the op numbered `number` needs each of its operands and gives each result; `operands` lie as they do.

        What they were `made` into for other ops costs nothing more.
        """
        needs: list[list[Placement]] = [[] for _ in op.operands]
        gives: list[list[Placement]] = [[] for _ in op.results]
        wishes = [self.wish(v.name) for v in op.results]
        work = _work(op)
        for axis in range(len(self.mesh.shape)):
            found = self._routed(number, op, axis, operands, wishes, needs, gives)
            need, give = found or self._factor(number, op, axis, work, operands, made, wishes, needs, gives)
            for have, placement in zip((*needs, *gives), (*need, *give), strict=True):
                have.append(placement)
        return [tuple(need) for need in needs], [tuple(give) for give in gives]

    def reaching(self, instance: Instance) -> int:
        """Equal for instances of one function in which the same is asked for.

        Where their operands lie alike too, they are laid out alike.
        """
        found: list[object] = []
        pending, known = self.wanted.pending, self.factoring.slots
        axes = range(len(self.mesh.shape))
        for name in instance.names.values():
            splits = self.wanted.splits[name]
            cuts = [s if s is None else (s, self._cut_number((name, *s), axis)) for axis, s in enumerate(splits)]
            asked = tuple(pending.get((name, axis)) for axis in axes) if pending else ()
            found.append((known.get(name, ()), tuple(cuts), asked))
        found += [
            self.reaching(inner) if isinstance(inner, Instance) else self.factoring.atoms[inner]
            for inner in instance.ops
        ]
        return self._numbers.setdefault(tuple(found), len(self._numbers))

    def _cut_number(self, slot: Slot, axis: int) -> int:
        """How the class of a slot is cut along an axis, as a number."""
        owner = self.factoring.classes[slot], axis
        if owner not in self._units_numbers:
            self._units_numbers[owner] = self._numbers.setdefault(self._units(axis, slot), len(self._numbers))
        return self._units_numbers[owner]

    def _units(self, axis: int, slot: Slot) -> Cut:
        owner = self.factoring.classes[slot]
        units = self.wanted.units[axis]
        if owner not in units:
            units[owner] = Cut.of(*balanced(self.factoring.size(slot), self.mesh.shape[axis]))
        return units[owner]

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
        """As `_factor`, where rows lie with their groups along the axis, or are to; None where they do not."""
        tensors = (*op.operands, *op.results)
        if lookup(op.name).split.routing is Routing.DISPATCH and op.results[0].name not in self.worked:
            return None

        def share(index: int) -> Placement:
            atom = next(a for a in self.factoring.atoms[number] if a.name == "group")
            place = atom.places[index]
            return R if place is None else self.shard(tensors[index].name, axis, place)

        def sendable(groups: Placement) -> bool:
            return not is_sent(needs[0], gives[0]) and self._is_blocks(op.operands[-1:], [groups], [needs[-1]])

        have = [v.dtensor.placements[axis] for v in operands]
        return routed(op, have, wishes[0][axis], share, sendable)

    def _factor(
        self,
        number: int,
        op: Op,
        axis: int,
        work: float,
        operands: Sequence[Value],
        made: Sequence[Sequence[Placed]],
        wishes: list[Placed],
        needs: list[list[Placement]],
        gives: list[list[Placement]],
    ) -> tuple[list[Placement], list[Placement]]:
        """The placements that the op needs and gives along one axis; `work` is what it computes.

        Where all operands lie split along one factor already, the op is split along it: gathering would undo what the
        annotations asked for. Otherwise the least time wins, bytes moved and operations done; ties favour a split. Of
        what lies split along other axes too, only that part is moved, and worked on, that devices along this one have.
        """
        tensors = (*op.operands, *op.results)
        count = len(operands)
        have = [v.dtensor.placements[axis] for v in operands]
        lie = [*(v.dtensor.placements for v in operands), *wishes]
        shares = [self._share((*p, *q[axis + 1 :]), axis) for p, q in zip((*needs, *gives), lie, strict=True)]
        positional = lookup(op.name, op.location).split.positional
        best: tuple[tuple[bool, float], list[Placement], list[Placement]] | None = None
        mine = work * min(shares, default=1.0)
        candidates: list[Atom | None] = [a for a in self.factoring.atoms[number] if a.kind != BLOCKED]
        wished = [*have, *(wish[axis] for wish in wishes)]
        for atom in [*candidates, None]:
            if atom and not self._is_useful(atom, axis, tensors, wished):
                continue
            placed = self._placed(atom, axis, tensors, count)
            settled = (*needs, *gives)
            if not all(divides(p, before) for p, before in zip(placed, settled, strict=True)):
                continue
            if (
                atom
                and (atom.name in positional or atom.kind == WINDOW)
                and not self._is_blocks(tensors, placed, settled)
            ):
                continue
            moved = (*have, *placed[count:]), (*placed[:count], *(wish[axis] for wish in wishes))
            known = [
                any(layout[: axis + 1] == (*before, p) for layout in layouts)
                for layouts, before, p in zip(made, needs, placed[:count], strict=True)
            ]
            costs = [0.0 if is_known else share for is_known, share in zip_longest(known, shares, fillvalue=False)]
            moves = sum(cost * self._cost(v, p, n, axis) for cost, v, p, n in zip(costs, tensors, *moved, strict=True))
            if atom and atom.kind == WINDOW:
                moves += sum(
                    share * atom.reach * v.tensor.bytes / atom.size
                    for share, v, place in zip(shares, op.operands, atom.places, strict=False)
                    if place is not None
                )
            apart = not (atom and have == placed[:count] and any(isinstance(p, Shard) for p in have))
            rank = (apart, moves + mine / (self.mesh.shape[axis] if atom else 1))
            if best is None or rank < best[0]:
                best = (rank, placed[:count], placed[count:])
        assert best is not None
        return best[1], best[2]

    def _placed(self, atom: Atom | None, axis: int, tensors: Sequence[Value], count: int) -> list[Placement]:
        """How the tensors of an op, of which the first `count` are operands, lie if it is split along the atom."""
        placed: list[Placement] = []
        for t, value in enumerate(tensors):
            place = atom.places[t] if atom else None
            if place is not None:
                placed.append(self.shard(value.name, axis, place))
            elif atom and atom.kind not in (PARALLEL, WINDOW) and t >= count:
                placed.append(Partial(atom.kind))
            else:
                placed.append(R)
        return placed

    def _is_useful(self, atom: Atom, axis: int, tensors: Sequence[Value], wished: Sequence[Placement]) -> bool:
        """Whether some operand lies split along the atom already, or some result is to."""
        return any(
            place is not None
            and isinstance(p, Shard)
            and p.dim == place[0]
            and p == self.shard(value.name, axis, place)
            for place, p, value in zip(atom.places, wished, tensors, strict=True)
        )

    def _is_blocks(
        self, tensors: Sequence[Value], placed: Sequence[Placement], settled: Sequence[Sequence[Placement]]
    ) -> bool:
        """Whether each device holds one block of every split dim, in order, after the axes that are `settled`."""
        return all(
            block_bounds([*before, p], p.dim, v.tensor.shape[p.dim], self.mesh.shape) is not None
            for v, p, before in zip(tensors, placed, settled, strict=True)
            if isinstance(p, Shard)
        )

    def _share(self, others: Sequence[Placement], axis: int) -> float:
        """The part of a value that those devices have together which differ along `axis` alone."""
        sizes = (*self.mesh.shape[:axis], *self.mesh.shape[axis + 1 :])
        return 1.0 / math.prod(size for size, p in zip(sizes, others, strict=True) if isinstance(p, Shard))

    def _cost(self, value: Value, source: Placement, target: Placement, axis: int) -> float:
        if source == target:
            return 0.0
        return cost(source, target, self.mesh.shape[axis], value.tensor.bytes)


def divides(placement: Placement, others: Sequence[Placement]) -> bool:
    """Whether a split divides each part that `others` leave of its dim by itself; anything else does no harm."""
    if not isinstance(placement, Shard) or placement.cut is None:
        return True
    cuts = (p.cut for p in others if isinstance(p, Shard) and p.dim == placement.dim)
    return all(cut is not None and nested(cut, placement.cut) for cut in cuts)


def _work(op: Op) -> float:
    """The op's computation, as the bytes that could be sent in the time."""
    operands, results = [v.tensor for v in op.operands], [v.tensor for v in op.results]
    return flops(lookup(op.name, op.location), operands, op.attrs, results) / FLOPS_PER_BYTE
