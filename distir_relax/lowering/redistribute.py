"""A `redistribute` as collectives along mesh axes, uneven and interleaved shards included.

A step works on one dim of what a group of devices holds together: all of the dim, or the part of it that the other
mesh axes leave to the group where they cut it too. A collective joins shards in the order of the devices. Where a
device holds several stretches of a dim (a fused QKV weight) the joined tensor is in another order than the dim, so a
local `slices` puts it right, before or after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distir_relax.ir import Attribute, DTensorType, Kinds, Value, mesh_kinds
from distir_relax.layout import Cut, Interval, Partial, Placement, Replicate, Shard, held_intervals, intersect
from distir_relax.lowering.distributed_builder import PlacedEmitter, merge_attrs
from distir_relax.lowering.padding import Tails
from distir_relax.sharding import Transition, plan

Pieces = list[list[Interval]]
"""For each index along a mesh axis, the intervals of a dim that it holds."""


def lower_redistribute(
    emitter: PlacedEmitter, tails: Tails, value: Value, source: DTensorType, target: DTensorType
) -> Value:
    """Emit the ops that take the local tensors of `value` from `source` to `target`; the resulting value."""
    if tails.mode != "ragged":
        return _lowered(emitter, tails, value, source, target)
    # A model's layers ask for the same again and again.
    return emitter.again((source, target), value, lambda given: _lowered(emitter, tails, given, source, target))


def lower_transition(move: Move, value: Value, step: Transition) -> Value:
    """Emit the ops of one step of a redistribution, of values that are not filled up; the resulting value."""
    value = _STEPS[type(step.source), type(step.target)](move, value, step)
    move.to(step)
    return value


def _lowered(emitter: PlacedEmitter, tails: Tails, value: Value, source: DTensorType, target: DTensorType) -> Value:
    steps = plan(source, target, emitter.mesh)
    axes = {step.axis for step in steps}
    dims = {p.dim for step in steps for p in (step.source, step.target) if isinstance(p, Shard)}
    value = tails.trim_all(emitter, value, source.placements, axes, dims)
    move = Move(emitter, source.shape, list(source.placements))
    for step in steps:
        value = lower_transition(move, value, step)
    return tails.pad_all(emitter, value, target.placements, axes, dims)


@dataclass(slots=True)
class Move:
    """A tensor of global `shape` on its way; `placements` is how it lies now."""

    emitter: PlacedEmitter
    shape: tuple[int, ...]
    placements: list[Placement]
    _pieces: dict[object, Pieces] = field(default_factory=dict)
    """What was found by `pieces` in the step under way: devices of one group have it in common."""

    def to(self, step: Transition) -> None:
        """Note that a step is done."""
        self.placements[step.axis] = step.target
        self._pieces.clear()

    def axis(self, step: Transition) -> str:
        """The name of the mesh axis of a step."""
        return self.emitter.mesh.axes[step.axis]

    def index(self, step: Transition, device: int) -> int:
        """The index of a device along the step's mesh axis."""
        return self.emitter.mesh.coordinates(device)[step.axis]

    def together(self, step: Transition, dim: int, device: int) -> list[Interval]:
        """The intervals of `dim` that the device's group along the step's axis holds together."""
        others = [p for i, p in enumerate(self.placements) if i != step.axis]
        coordinates = self.emitter.mesh.coordinates(device)
        return held_intervals(others, dim, self.shape[dim], [c for i, c in enumerate(coordinates) if i != step.axis])

    def pieces(self, step: Transition, placement: Placement, device: int) -> Pieces:
        """What each index along the step's axis holds, in the device's group, of the dim that `placement` cuts."""
        cut, dim = _cut(placement)
        key = (id(placement), self.group(step, dim, device))
        if key not in self._pieces:
            whole = self.together(step, dim, device)
            self._pieces[key] = [intersect(whole, cut.intervals(i)) for i in range(cut.ranks)]
        return self._pieces[key]

    def group(self, step: Transition, dim: int, device: int) -> tuple[int, ...]:
        """Equal for devices whose groups along the step's axis hold the same of `dim`."""
        coordinates = self.emitter.mesh.coordinates(device)
        others = ((i, p) for i, p in enumerate(self.placements) if i != step.axis)
        return tuple(coordinates[i] for i, p in others if isinstance(p, Shard) and p.dim == dim)

    def kinds(self, step: Transition) -> Kinds:
        """Which devices are alike in a step: those with the same index along its axis and along those that cut."""
        axes = (i for i, p in enumerate(self.placements) if i == step.axis or isinstance(p, Shard))
        return mesh_kinds(self.emitter.mesh, tuple(axes))

    def by_device(self, step: Transition, attrs: Callable[[int], dict[str, Attribute]]) -> dict[str, Attribute]:
        """Attributes that may differ by device."""
        kinds = self.kinds(step)
        return merge_attrs([attrs(device) for device in kinds.firsts], kinds)

    def mine(self, step: Transition, placement: Shard) -> dict[str, Attribute]:
        """The attributes of an op that leaves each device its own part."""

        def attrs(device: int) -> dict[str, Attribute]:
            sizes = _sizes(self.pieces(step, placement, device))
            return {"sizes": sizes, "size": sizes[self.index(step, device)]}

        return {"axis": self.axis(step), "dim": placement.dim, **self.by_device(step, attrs)}

    def slices(self, value: Value, step: Transition, dim: int, intervals: Callable[[int], list[Interval]]) -> Value:
        """`value` with the stretches of `dim` that `intervals(device)` lists, in that order."""
        kinds = self.kinds(step)
        rows = [_merged(intervals(device)) for device in kinds.firsts]
        if all(len(row) <= 1 for row in rows):
            return value
        longest = max(map(len, rows))
        # An op has as many intervals on one device as on another; empty ones fill up.
        attrs = merge_attrs([{"intervals": (*row, *[(0, 0)] * (longest - len(row)))} for row in rows], kinds)
        return self.emitter.one("slices", value, dim=dim, **attrs)

    def to_device_order(self, value: Value, step: Transition, placement: Shard) -> Value:
        """The dim that `placement` cuts, all of device 0 first, then all of device 1."""
        return self.slices(
            value,
            step,
            placement.dim,
            lambda d: _positions(self.pieces(step, placement, d), self.together(step, placement.dim, d)),
        )

    def from_device_order(self, value: Value, step: Transition, placement: Shard) -> Value:
        """The inverse of `to_device_order`."""
        return self.slices(value, step, placement.dim, lambda d: _in_order(self.pieces(step, placement, d)))


def _gather(move: Move, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Shard)
    sizes = move.by_device(step, lambda d: {"sizes": _sizes(move.pieces(step, step.source, d))})
    value = move.emitter.one("all_gather", value, axis=move.axis(step), dim=step.source.dim, **sizes)
    return move.from_device_order(value, step, step.source)


def _slice(move: Move, value: Value, step: Transition) -> Value:
    assert isinstance(step.target, Shard)
    value = move.to_device_order(value, step, step.target)
    return move.emitter.one("shard", value, **move.mine(step, step.target))


def _reduce(move: Move, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Partial)
    return move.emitter.one("all_reduce", value, axis=move.axis(step), op=step.source.reduction)


def _reduce_scatter(move: Move, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Partial)
    assert isinstance(step.target, Shard)
    value = move.to_device_order(value, step, step.target)
    return move.emitter.one("reduce_scatter", value, **move.mine(step, step.target), op=step.source.reduction)


def _exchange(move: Move, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Shard)
    assert isinstance(step.target, Shard)
    if step.source.dim == step.target.dim:
        return _resplit(move, value, step)
    source, target = step.source, step.target
    value = move.to_device_order(value, step, target)

    def attrs(device: int) -> dict[str, Attribute]:
        sizes = _sizes(move.pieces(step, target, device))
        held = _sizes(move.pieces(step, source, device))
        return {"split_sizes": sizes, "concat_sizes": held, "size": sizes[move.index(step, device)]}

    value = move.emitter.one(
        "all_to_all",
        value,
        axis=move.axis(step),
        split_dim=target.dim,
        concat_dim=source.dim,
        **move.by_device(step, attrs),
    )
    return move.from_device_order(value, step, source)


def _resplit(move: Move, value: Value, step: Transition) -> Value:
    """Between two cuts of one dim: each device sends each other what that one is to hold."""
    _, dim = _cut(step.source)

    known: dict[tuple[int, ...], list[Pieces]] = {}

    def cells(device: int) -> list[Pieces]:
        group = move.group(step, dim, device)
        if group not in known:
            have, want = move.pieces(step, step.source, device), move.pieces(step, step.target, device)
            known[group] = [[intersect(a, b) for b in want] for a in have]
        return known[group]

    def leaving(device: int) -> list[Interval]:
        row = cells(device)[move.index(step, device)]
        return _positions(row, move.pieces(step, step.source, device)[move.index(step, device)])

    def arriving(device: int) -> list[Interval]:
        return _in_order([row[move.index(step, device)] for row in cells(device)])

    def attrs(device: int) -> dict[str, Attribute]:
        moved = tuple(_sizes(row) for row in cells(device))
        return {"pieces": moved, "size": sum(row[move.index(step, device)] for row in moved)}

    value = move.slices(value, step, dim, leaving)
    value = move.emitter.one("resplit", value, axis=move.axis(step), dim=dim, **move.by_device(step, attrs))
    return move.slices(value, step, dim, arriving)


def _as_term(move: Move, value: Value, step: Transition) -> Value:
    """A shard among zeros is a term of a sum."""
    source = step.source
    assert isinstance(source, Shard)
    assert step.target == Partial("sum")
    rank = len(move.shape)

    def attrs(device: int) -> dict[str, Attribute]:
        sizes, me = _sizes(move.pieces(step, source, device)), move.index(step, device)
        low, high = [0] * rank, [0] * rank
        low[source.dim], high[source.dim] = sum(sizes[:me]), sum(sizes[me + 1 :])
        return {"low": tuple(low), "high": tuple(high)}

    number = 0.0 if "float" in value.placed.dtype else 0
    value = move.emitter.one("pad", value, value=number, **move.by_device(step, attrs))
    return move.from_device_order(value, step, source)


def _as_whole_term(move: Move, value: Value, step: Transition) -> Value:
    """What every device holds is its own mean, maximum and minimum; a number is a term on the first device alone."""
    if step.target != Partial("sum"):
        return value
    whole = Shard(0, Cut.of(1, *[0] * (move.emitter.mesh.shape[step.axis] - 1)))
    row = Move(move.emitter, (1,), move.placements)
    value = move.emitter.one("reshape", value, shape=(1,))
    value = _slice(row, value, Transition(step.axis, step.source, whole))
    value = _as_term(row, value, Transition(step.axis, whole, step.target))
    return move.emitter.one("reshape", value, shape=())


_STEPS: dict[tuple[type, type], Callable[[Move, Value, Transition], Value]] = {
    (Shard, Replicate): _gather,
    (Replicate, Shard): _slice,
    (Partial, Replicate): _reduce,
    (Partial, Shard): _reduce_scatter,
    (Shard, Shard): _exchange,
    (Shard, Partial): _as_term,
    (Replicate, Partial): _as_whole_term,
}


def _cut(placement: Placement) -> tuple[Cut, int]:
    assert isinstance(placement, Shard)
    assert placement.cut is not None
    return placement.cut, placement.dim


def _sizes(pieces: Pieces) -> tuple[int, ...]:
    return tuple(sum(b - a for a, b in piece) for piece in pieces)


def _positions(pieces: Pieces, within: Sequence[Interval]) -> list[Interval]:
    """Where the intervals of `pieces`, one piece after the other, stand in a tensor that holds `within`."""
    starts: list[tuple[Interval, int]] = []
    position = 0
    for start, stop in within:
        starts.append(((start, stop), position - start))
        position += stop - start
    found = []
    for piece in pieces:
        for a, b in piece:
            shift = next(shift for (start, stop), shift in starts if start <= a < stop)
            found.append((a + shift, b + shift))
    return found


def _in_order(pieces: Pieces) -> list[Interval]:
    """Where each stretch of the dim, in order, stands in a tensor that holds one piece after the other."""
    found = []
    position = 0
    for piece in pieces:
        for start, stop in piece:
            found.append((start, (position, position + stop - start)))
            position += stop - start
    return [interval for _, interval in sorted(found)]


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
