"""Seconds of op strategies and redistributions, as the simulator counts them.

An op whose shards are ordinary ops takes the cost model's time of the largest shard. All others (expansions on shards,
halos, collectives) are written into one program, lowered as usual, and simulated. A redistribution is the sum of its
steps, each along one mesh axis on the part of the tensor that the other axes leave to a device.
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

from distir_relax.autosharding.op_strategies import OpStrategy
from distir_relax.autosharding.reshard_steps import ReshardCosts, StepForm
from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import op_seconds
from distir_relax.ir import PLACEMENTS, DTensorType, Function, Input, Module, Op, Output, TensorType, Value
from distir_relax.ir.symbols import typical_layout, typical_op
from distir_relax.layout import (
    Cut,
    DeviceMesh,
    Interval,
    Placement,
    R,
    Segment,
    Shard,
    intersect,
    local_intervals,
)
from distir_relax.lowering import ToDistIR
from distir_relax.ops import Trait, lookup
from distir_relax.sharding import Transition, plan
from distir_relax.sharding.factor_selection import Placed
from distir_relax.simulation.op_timer import FEMTOSECONDS, femtoseconds
from distir_relax.simulation.simulator import simulate_module

Array = npt.NDArray[Any]
_ROLES = ("parameter", "constant")


@dataclass(slots=True)
class CostTable:
    """Costs on a mesh of a machine: request all that are needed, `compute` them, then read them."""

    mesh: DeviceMesh
    profile: Profile
    tail: str = "ragged"
    updates_weights: bool = False
    """Whether the program updates its weights; a backend cannot prepack them then."""
    _op_seconds: dict[object, float] = field(default_factory=dict)
    _requested_ops: dict[object, tuple[Op, tuple[str, ...]]] = field(default_factory=dict)
    """The ops that are requested and not computed yet, with the roles of their operands."""
    _steps: ReshardCosts = field(init=False)
    _reshards: dict[tuple[TensorType, Placed], dict[Placed, float]] = field(init=False)
    """The seconds of each redistribution, by its source and its target."""
    _requested_reshards: dict[object, tuple[TensorType, Placed, Placed]] = field(default_factory=dict)
    """The redistributions among `_requested_ops`."""

    def __post_init__(self) -> None:
        self._steps = ReshardCosts.on(self.mesh, self.profile)
        self._reshards = {} if self._simulates_whole else self._steps.reshards

    @property
    def _simulates_whole(self) -> bool:
        """Return whether a redistribution is simulated as a whole: with padding, or on heterogeneous devices."""
        return self.tail != "ragged" or bool(self.profile.groups)

    def op_seconds(self, op: Op, strategy: OpStrategy, roles: tuple[str, ...]) -> float:
        """Return the seconds of an op with a strategy, without its reductions; `roles` are those of `request_op`."""
        return self._op_seconds[_op_key(op, strategy, roles)]

    def reshard_seconds(self, tensor: TensorType, source: Placed, target: Placed) -> float:
        """Return the seconds of a redistribution."""
        if source == target:
            return 0.0
        return self._reshards[tensor, source][target]

    def reshard_matrix(
        self, tensor: TensorType, sources: Sequence[Placed], targets: Sequence[Placed], mask: Array
    ) -> Array:
        """Return the seconds of redistributions from each source (row) to each target (column) of `mask`."""
        seconds = np.zeros(mask.shape)
        for s, source in enumerate(sources):
            by_target = self._reshards[tensor, source]
            indices = np.flatnonzero(mask[s])
            seconds[s, indices] = [by_target[targets[t]] for t in indices.tolist()]
        return seconds

    def request_op(self, op: Op, strategy: OpStrategy, roles: tuple[str, ...]) -> None:
        """Request the cost of an op with a strategy; `roles` has the role of each operand that is an input."""
        key = _op_key(op, strategy, roles)
        if key in self._op_seconds:
            return
        operands = tuple(_with_layout(v, layout) for v, layout in zip(op.operands, strategy.in_layouts, strict=True))
        results = tuple(_with_layout(v, layout) for v, layout in zip(op.results, strategy.out_layouts, strict=True))
        sharded = typical_op(Op(op.name, operands, results, op.attrs, op.location))
        if self.tail == "ragged" and _is_local(op, strategy, roles):
            self._op_seconds[key] = self._local_time(sharded, roles)
        else:
            self._op_seconds[key] = math.nan
            self._requested_ops[key] = sharded, roles

    def request_reshards(
        self, tensor: TensorType, sources: Sequence[Placed], targets: Sequence[Placed], mask: Array
    ) -> None:
        """Request the costs of redistributions from each source (row) to each target (column) of `mask`."""
        for s, source in enumerate(sources):
            by_target = self._reshards.setdefault((tensor, source), {source: 0.0})
            for t in np.flatnonzero(mask[s]).tolist():
                if targets[t] not in by_target:
                    by_target[targets[t]] = self._request_reshard(tensor, source, targets[t])

    def _request_reshard(self, tensor: TensorType, source: Placed, target: Placed) -> float:
        """Return the seconds of a redistribution, or nan and request it if it is simulated as a whole."""
        shape = tensor.typical.shape
        before, after = (DTensorType(shape, tensor.dtype, typical_layout(layout)) for layout in (source, target))
        if self._simulates_whole:
            attrs = {PLACEMENTS: after.placements}
            key = (before, after, "whole")
            self._requested_ops[key] = (Op("redistribute", (Value("x", before),), (Value("y", after),), attrs), ("",))
            self._requested_reshards[key] = tensor, source, target
            return math.nan
        seconds = []
        placements = list(before.placements)
        for step in plan(before, after, self.mesh):
            seconds.append(self._steps.seconds(*_canonical(before.tensor, tuple(placements), step, self.mesh)))
            placements[step.axis] = step.target
        return float(sum(seconds))

    def compute(self) -> None:
        """Compute all requested costs."""
        if not self._requested_ops:
            return
        builder = _ProgramBuilder(self.mesh, self.tail, self.updates_weights)
        for number, (op, roles) in enumerate(self._requested_ops.values()):
            builder.add(number, op, roles)
        simulation = simulate_module(builder.module(), self.profile)
        durations: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for event, _ in simulation.events():
            for c in event.classes:
                durations[event.op.location][c] += event.duration
        for number, key in enumerate(self._requested_ops):
            seconds = max(durations[str(number)].values(), default=0) / FEMTOSECONDS
            if key in self._requested_reshards:
                tensor, source, target = self._requested_reshards[key]
                self._reshards[tensor, source][target] = seconds
            else:
                self._op_seconds[key] = seconds
        self._requested_ops, self._requested_reshards = {}, {}

    def _local_time(self, op: Op, roles: tuple[str, ...]) -> float:
        """Return the seconds of an op on the largest shards, or on the slowest device, rounded as in the simulator."""
        entry = lookup(op.name, op.location)
        is_persistent = [role in _ROLES for role in roles]
        is_constant = any(is_persistent) and not self.updates_weights
        cold = (*is_persistent, *[False] * len(op.results)) if self.profile.cache else ()
        specs = self.profile.device_specs(self.mesh.size) if self.profile.groups else ((1.0, 0.0),)
        slowest, values = 0.0, (*op.operands, *op.results)
        for device, (speed, _) in enumerate(specs):
            shards = [shard_type(v.dtensor.tensor, v.dtensor.placements, self.mesh, device) for v in values]
            ins, outs = shards[: len(op.operands)], shards[len(op.operands) :]
            is_replicated = all(shard == v.dtensor.tensor for shard, v in zip(shards, values, strict=True))
            localize = None if is_replicated else entry.split.localize
            attrs = localize(op.attrs, ins, outs) if localize is not None else op.attrs
            slowest = max(slowest, op_seconds(self.profile, entry, ins, attrs, outs, is_constant, cold, speed))
        return femtoseconds(slowest) / FEMTOSECONDS


@lru_cache(maxsize=1 << 16)
def shard_type(tensor: TensorType, layout: Placed, mesh: DeviceMesh, device: int) -> TensorType:
    """Return the type of the shard of a tensor on a device, with typical sizes."""
    tensor, layout = tensor.typical, typical_layout(layout)
    cut = {p.dim for p in layout if isinstance(p, Shard)}
    shape = tuple(_local_size(layout, d, n, mesh, device) if d in cut else n for d, n in enumerate(tensor.shape))
    return TensorType(shape, tensor.dtype)


@dataclass(slots=True)
class _ProgramBuilder:
    """A program of ops of the sharded stage, each with its number as location."""

    mesh: DeviceMesh
    tail: str
    updates_weights: bool
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def add(self, number: int, op: Op, roles: tuple[str, ...]) -> None:
        """Add an op."""
        operands = tuple(Value(f"x{number}.{i}", v.type) for i, v in enumerate(op.operands))
        results = tuple(Value(f"y{number}.{i}", v.type) for i, v in enumerate(op.results))
        roles = tuple("" for _ in roles) if self.updates_weights else roles
        self.inputs += [Input(v, role or "input") for v, role in zip(operands, roles, strict=True)]
        self.outputs += [Output(v.name, v) for v in results]
        self.ops.append(Op(op.name, operands, results, op.attrs, str(number)))

    def module(self) -> Module:
        """Return the program of the distributed stage."""
        main = Function("main", tuple(self.inputs), tuple(self.ops), tuple(self.outputs))
        return ToDistIR(self.tail).run(Module("sharded", (main,), (self.mesh,)))


def _op_key(op: Op, strategy: OpStrategy, roles: tuple[str, ...]) -> object:
    types = tuple([v.type for v in (*op.operands, *op.results)])
    return (op.name, tuple(op.attrs.items()), types, strategy.in_layouts, strategy.out_layouts, roles)


def _is_local(op: Op, strategy: OpStrategy, roles: tuple[str, ...]) -> bool:
    """Return whether devices run the op itself on their shards: no communication, no localized weight attributes."""
    if all(p == R for layout in (*strategy.in_layouts, *strategy.out_layouts) for p in layout):
        return True
    entry = lookup(op.name, op.location)
    split = entry.split
    is_localized = split.localize and any(role in _ROLES or role == "state" for role in roles)
    special = split.expand or is_localized or split.windowed or split.routing is not None
    return not special and Trait.COMMUNICATES not in entry.traits and entry.cost.seconds is None


@lru_cache(maxsize=1 << 16)
def _canonical(tensor: TensorType, placements: Placed, step: Transition, mesh: DeviceMesh) -> tuple[StepForm, int, str]:
    """Return an equivalent step on a tensor of fewer dims, the count of inner elements, and the dtype.

    The dims that the step splits or gathers come first; all others are merged into one inner dim, of the size that the
    other mesh axes leave of them. A dim that another axis cuts in blocks is replaced by the first block, and sizes are
    counted in the largest units that no cut divides. So steps that cost the same are simulated once.
    """
    dims = list(dict.fromkeys(p.dim for p in (step.source, step.target) if isinstance(p, Shard)))
    others = tuple(R if axis == step.axis else p for axis, p in enumerate(placements))
    inner = 1
    for dim, size in enumerate(tensor.shape):
        if dim not in dims:
            inner *= _local_size(placements, dim, size, mesh)
    shape = list(tensor.shape)
    ends: list[Placement] = [step.source, step.target]
    for dim in dims:
        cuts = [p.cut for p in ends if isinstance(p, Shard) and p.dim == dim and p.cut]
        part = _restrict(others, dim, tensor.shape[dim], mesh, cuts)
        if part is not None:
            shape[dim], local = part
            ends = [Shard(dim, local[p.cut]) if isinstance(p, Shard) and p.dim == dim and p.cut else p for p in ends]
            others = tuple(R if isinstance(p, Shard) and p.dim == dim else p for p in others)

    def renumber(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        return Shard(dims.index(placement.dim), placement.cut) if placement.dim in dims else R

    before = [renumber(p) if isinstance(p, Shard) else R for p in others]
    before[step.axis] = renumber(ends[0])
    after = renumber(ends[1])
    sizes = [shape[dim] for dim in dims]
    for dim in range(len(dims)):
        sizes[dim], unit, (*before, after) = _to_units(sizes[dim], dim, (*before, after))
        inner *= unit
    return (StepForm(tuple(sizes), tuple(before), Transition(step.axis, before[step.axis], after)), inner, tensor.dtype)


def _to_units(size: int, dim: int, placements: Placed) -> tuple[int, int, Placed]:
    """Return the size of a dim in the largest units that no cut divides, the size of a unit, and the cuts in units."""
    cuts = [p.cut for p in placements if isinstance(p, Shard) and p.dim == dim and p.cut]
    unit = math.gcd(size, *(n for cut in cuts for segment in cut.segments for n in segment.sizes))
    if unit <= 1:
        return size, 1, placements

    def in_units(placement: Placement) -> Placement:
        if not isinstance(placement, Shard) or placement.dim != dim or placement.cut is None:
            return placement
        segments = (Segment(s.repeat, tuple(n // unit for n in s.sizes)) for s in placement.cut.segments)
        return Shard(dim, Cut(tuple(segments)))

    return size // unit, unit, tuple(map(in_units, placements))


def _restrict(
    others: Placed, dim: int, size: int, mesh: DeviceMesh, cuts: Sequence[Cut]
) -> tuple[int, dict[Cut, Cut]] | None:
    """Return the size of the first device's part of a dim, and the cuts of it; None if it is not cut in blocks."""
    if not any(isinstance(p, Shard) and p.dim == dim for p in others):
        return None
    intervals = local_intervals(others, dim, size, mesh.coordinates(0))
    restricted: dict[Cut, Cut] = {}
    for cut in cuts:
        pieces = [intersect(intervals, cut.intervals(i)) for i in range(cut.ranks)]
        if _merge(interval for piece in pieces for interval in piece) != _merge(intervals):
            return None
        restricted[cut] = Cut.of(*(sum(b - a for a, b in piece) for piece in pieces))
    return sum(b - a for a, b in intervals), restricted


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals in their order, with adjacent ones merged."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged


@lru_cache(maxsize=1 << 16)
def _local_size(placements: tuple[Placement, ...], dim: int, size: int, mesh: DeviceMesh, device: int = 0) -> int:
    return sum(b - a for a, b in local_intervals(placements, dim, size, mesh.coordinates(device)))


def _with_layout(value: Value, layout: Placed) -> Value:
    tensor = value.tensor
    return Value(value.name, DTensorType(tensor.shape, tensor.dtype, layout))
