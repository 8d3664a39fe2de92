"""How long each way to do an op takes, and each redistribution, as the simulator has it.

An op whose shards are ordinary ops of their sizes takes what the cost model says of the largest. All else is written
into one program, lowered as any other, and simulated: expansions on shards, halos, collectives. A redistribution is the
sum of its steps, each along one mesh axis, of what the other axes leave to a device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.analysis.op_timer import FEMTOSECONDS, femtoseconds
from distir_relax.analysis.simulator import simulate_module
from distir_relax.autosharding.op_strategies import Way
from distir_relax.autosharding.reshard_steps import Form, Steps
from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import op_seconds
from distir_relax.ir import DTensorType, Function, Input, Module, Op, Output, TensorType, Value
from distir_relax.layout import (
    Cut,
    DeviceMesh,
    Interval,
    Placement,
    R,
    Segment,
    Shard,
    held_intervals,
    intersect,
    print_placements,
)
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Trait, lookup
from distir_relax.sharding import Transition, plan
from distir_relax.sharding.factor_selection import Placed

Array = npt.NDArray[Any]
_ROLES = ("parameter", "constant")


@dataclass(slots=True)
class Prices:
    """Prices on a mesh of a machine: first all are asked for, then `find` makes them, and then they are known."""

    mesh: DeviceMesh
    profile: Profile
    tail: str = "ragged"
    changes: bool = False
    """Whether the program updates its weights: a backend cannot lay them out once."""
    _known: dict[object, float] = field(default_factory=dict)
    _ops: dict[object, tuple[Op, tuple[str, ...]]] = field(default_factory=dict)
    """The ops that are asked for and not found yet, with the roles of their operands."""
    _steps: Steps = field(init=False)
    _moves: dict[tuple[TensorType, Placed], dict[Placed, float]] = field(init=False)
    """The seconds of each redistribution, by its source and its target."""
    _waiting: dict[object, tuple[TensorType, Placed, Placed]] = field(default_factory=dict)
    """The redistributions among `_ops`."""

    def __post_init__(self) -> None:
        self._steps = Steps.on(self.mesh, self.profile)
        self._moves = {} if self._is_whole else self._steps.moves

    @property
    def _is_whole(self) -> bool:
        """Whether a redistribution is simulated whole: what is filled up is trimmed first, and filled up again; and
        unlike devices are not told by the first."""
        return self.tail != "ragged" or bool(self.profile.groups)

    def of_op(self, op: Op, way: Way, roles: tuple[str, ...]) -> float:
        """The seconds of an op in a way, its pending sums left pending; `roles` are those of `ask_op`."""
        return self._known[_op_key(op, way, roles)]

    def of_move(self, kind: TensorType, source: Placed, target: Placed) -> float:
        """The seconds of a redistribution."""
        if source == target:
            return 0.0
        return self._moves[kind, source][target]

    def of_moves(self, kind: TensorType, sources: Sequence[Placed], targets: Sequence[Placed], may: Array) -> Array:
        """The seconds of redistributions from each source (row) to each target (column) where there `may` be one."""
        found = np.zeros(may.shape)
        for s, source in enumerate(sources):
            known = self._moves[kind, source]
            some = np.flatnonzero(may[s])
            found[s, some] = [known[targets[t]] for t in some.tolist()]
        return found

    def ask_op(self, op: Op, way: Way, roles: tuple[str, ...]) -> None:
        """Ask for the price of an op in a way; of operands that are inputs, `roles` has what they are."""
        key = _op_key(op, way, roles)
        if key in self._known:
            return
        operands = tuple(_laid_out(v, lies) for v, lies in zip(op.operands, way.needs, strict=True))
        results = tuple(_laid_out(v, lies) for v, lies in zip(op.results, way.gives, strict=True))
        if self.tail == "ragged" and _is_plain(op, way, roles):
            self._known[key] = self._plain(op, operands, results, roles)
        else:
            self._known[key] = math.nan
            self._ops[key] = Op(op.name, operands, results, op.attrs), roles

    def ask_moves(self, kind: TensorType, sources: Sequence[Placed], targets: Sequence[Placed], may: Array) -> None:
        """Ask for the prices of redistributions from each source (row) to each target (column) where there `may` be
        one."""
        for s, source in enumerate(sources):
            known = self._moves.setdefault((kind, source), {source: 0.0})
            for t in np.flatnonzero(may[s]).tolist():
                if targets[t] not in known:
                    known[targets[t]] = self._move(kind, source, targets[t])

    def _move(self, kind: TensorType, source: Placed, target: Placed) -> float:
        """The seconds of a redistribution; where it is simulated whole, they are asked for."""
        have, want = (DTensorType(kind.shape, kind.dtype, lies) for lies in (source, target))
        if self._is_whole:
            attrs = {"placements": print_placements(want.placements)}
            key = (have, want, "whole")
            self._ops[key] = Op("redistribute", (Value("x", have),), (Value("y", want),), attrs), ("",)
            self._waiting[key] = kind, source, target
            return math.nan
        found = []
        placements = list(source)
        for step in plan(have, want, self.mesh):
            found.append(self._steps.seconds(*_alone(kind, tuple(placements), step, self.mesh)))
            placements[step.axis] = step.target
        return float(sum(found))

    def find(self) -> None:
        """Find the price of all that was asked for."""
        if not self._ops:
            return
        written = _Written(self.mesh, self.tail, self.changes)
        for number, (op, roles) in enumerate(self._ops.values()):
            written.add(number, op, roles)
        found = simulate_module(written.module(), self.profile)
        taken: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for event, _ in found.events():
            for c in event.classes:
                taken[event.op.location][c] += event.duration
        for number, key in enumerate(self._ops):
            seconds = max(taken[str(number)].values(), default=0) / FEMTOSECONDS
            if key in self._waiting:
                kind, source, target = self._waiting[key]
                self._moves[kind, source][target] = seconds
            else:
                self._known[key] = seconds
        self._ops, self._waiting = {}, {}

    def _plain(self, op: Op, operands: Sequence[Value], results: Sequence[Value], roles: tuple[str, ...]) -> float:
        """The time of an op on the first device, whose shards are the largest, as the simulator rounds it; of devices
        that are unlike, on the one that takes longest."""
        entry = lookup(op.name, op.location)
        lasting = [role in _ROLES for role in roles]
        is_fixed = any(lasting) and not self.changes
        cold = (*lasting, *[False] * len(results)) if self.profile.cache else ()
        kinds = self.profile.kinds(self.mesh.size) if self.profile.groups else ((1.0, 0.0),)
        most, values = 0.0, (*operands, *results)
        for device, (speed, _) in enumerate(kinds):
            held = [held_type(v.dtensor.tensor, v.dtensor.placements, self.mesh, device) for v in values]
            takes, gives = held[: len(operands)], held[len(operands) :]
            is_whole = all(mine == v.dtensor.tensor for mine, v in zip(held, values, strict=True))
            local = None if is_whole else entry.split.localize
            attrs = local(op.attrs, takes, gives) if local is not None else op.attrs
            most = max(most, op_seconds(self.profile, entry, takes, attrs, gives, is_fixed, cold, speed))
        return femtoseconds(most) / FEMTOSECONDS


@lru_cache(maxsize=1 << 16)
def held_type(kind: TensorType, lies: Placed, mesh: DeviceMesh, device: int) -> TensorType:
    """What a device holds of a tensor."""
    cut = {p.dim for p in lies if isinstance(p, Shard)}
    shape = tuple(_held(lies, d, n, mesh, device) if d in cut else n for d, n in enumerate(kind.shape))
    return TensorType(shape, kind.dtype)


@dataclass(slots=True)
class _Written:
    """A program of ops of the sharded stage, each of which is known again by the number that its location is."""

    mesh: DeviceMesh
    tail: str
    changes: bool
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def add(self, number: int, op: Op, roles: tuple[str, ...]) -> None:
        """Add an op."""
        operands = tuple(Value(f"x{number}.{i}", v.type) for i, v in enumerate(op.operands))
        results = tuple(Value(f"y{number}.{i}", v.type) for i, v in enumerate(op.results))
        roles = tuple("" for _ in roles) if self.changes else roles
        self.inputs += [Input(v, role or "input") for v, role in zip(operands, roles, strict=True)]
        self.outputs += [Output(v.name, v) for v in results]
        self.ops.append(Op(op.name, operands, results, op.attrs, str(number)))

    def module(self) -> Module:
        """The program of the distributed stage."""
        main = Function("main", tuple(self.inputs), tuple(self.ops), tuple(self.outputs))
        return ToDistIR(self.tail).run(Module("sharded", (main,), (self.mesh,)))


def _op_key(op: Op, way: Way, roles: tuple[str, ...]) -> object:
    kinds = tuple([v.type for v in (*op.operands, *op.results)])
    return (op.name, tuple(op.attrs.items()), kinds, way.needs, way.gives, roles)


def _is_plain(op: Op, way: Way, roles: tuple[str, ...]) -> bool:
    """Whether each device runs the op itself on its shards, with nothing sent, and with attributes as they are or, of
    what is no weight, as its shards are."""
    if all(p == R for lies in (*way.needs, *way.gives) for p in lies):
        return True
    entry = lookup(op.name, op.location)
    split = entry.split
    local = split.localize and any(role in _ROLES or role == "state" for role in roles)
    special = split.expand or local or split.windowed or split.routing is not None
    return not special and Trait.COMMUNICATES not in entry.traits and entry.cost.seconds is None


@lru_cache(maxsize=1 << 16)
def _alone(kind: TensorType, placements: Placed, step: Transition, mesh: DeviceMesh) -> tuple[Form, int, str]:
    """A step of a tensor of fewer dims that takes as long: the dims that the step is about come first, and all others
    are one. What the other mesh axes leave of them is all there is, where it lies in blocks; and they are in the
    largest units that no cut divides."""
    own = list(dict.fromkeys(p.dim for p in (step.source, step.target) if isinstance(p, Shard)))
    others = tuple(R if axis == step.axis else p for axis, p in enumerate(placements))
    rest = 1
    for dim, size in enumerate(kind.shape):
        if dim not in own:
            rest *= _held(placements, dim, size, mesh)
    shape = list(kind.shape)
    ends: list[Placement] = [step.source, step.target]
    for dim in own:
        cuts = [p.cut for p in ends if isinstance(p, Shard) and p.dim == dim and p.cut]
        found = _within(others, dim, kind.shape[dim], mesh, cuts)
        if found is not None:
            shape[dim], smaller = found
            ends = [Shard(dim, smaller[p.cut]) if isinstance(p, Shard) and p.dim == dim and p.cut else p for p in ends]
            others = tuple(R if isinstance(p, Shard) and p.dim == dim else p for p in others)

    def moved(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        return Shard(own.index(placement.dim), placement.cut) if placement.dim in own else R

    left = [moved(p) if isinstance(p, Shard) else R for p in others]
    left[step.axis] = moved(ends[0])
    last = moved(ends[1])
    sizes = [shape[dim] for dim in own]
    for dim in range(len(own)):
        sizes[dim], unit, (*left, last) = _in_units(sizes[dim], dim, (*left, last))
        rest *= unit
    return Form(tuple(sizes), tuple(left), Transition(step.axis, left[step.axis], last)), rest, kind.dtype


def _in_units(size: int, dim: int, placements: Placed) -> tuple[int, int, Placed]:
    """A dim counted in what all its cuts leave whole: how many of those there are, how large each, and the cuts."""
    cuts = [p.cut for p in placements if isinstance(p, Shard) and p.dim == dim and p.cut]
    unit = math.gcd(size, *(n for cut in cuts for segment in cut.segments for n in segment.sizes))
    if unit <= 1:
        return size, 1, placements

    def counted(placement: Placement) -> Placement:
        if not isinstance(placement, Shard) or placement.dim != dim or placement.cut is None:
            return placement
        segments = (Segment(s.repeat, tuple(n // unit for n in s.sizes)) for s in placement.cut.segments)
        return Shard(dim, Cut(tuple(segments)))

    return size // unit, unit, tuple(map(counted, placements))


def _within(
    others: Placed, dim: int, size: int, mesh: DeviceMesh, cuts: Sequence[Cut]
) -> tuple[int, dict[Cut, Cut]] | None:
    """How much of a dim the first device's group has, and what cuts are of that; None where it is not cut in blocks."""
    if not any(isinstance(p, Shard) and p.dim == dim for p in others):
        return None
    whole = held_intervals(others, dim, size, mesh.coordinates(0))
    found: dict[Cut, Cut] = {}
    for cut in cuts:
        pieces = [intersect(whole, cut.intervals(i)) for i in range(cut.ranks)]
        if _joined(interval for piece in pieces for interval in piece) != _joined(whole):
            return None
        found[cut] = Cut.of(*(sum(b - a for a, b in piece) for piece in pieces))
    return sum(b - a for a, b in whole), found


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals in their order, neighbours as one."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


@lru_cache(maxsize=1 << 16)
def _held(placements: tuple[Placement, ...], dim: int, size: int, mesh: DeviceMesh, device: int = 0) -> int:
    return sum(b - a for a, b in held_intervals(placements, dim, size, mesh.coordinates(device)))


def _laid_out(value: Value, lies: Placed) -> Value:
    kind = value.tensor
    return Value(value.name, DTensorType(kind.shape, kind.dtype, lies))
