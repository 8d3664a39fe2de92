"""A `redistribute` as collectives along mesh axes, uneven and interleaved shards included.

A collective joins shards in the order of the devices. Where a device holds several stretches of a dim (a fused QKV
weight) the joined tensor is in another order than the dim, so a local `slices` puts it right, before or after.
"""

from __future__ import annotations

from distir_relax.ir import Attribute, Cut, DeviceMesh, DTensorType, Partial, Replicate, Shard, Value
from distir_relax.lowering.emitter import PlacedEmitter, placed
from distir_relax.lowering.tails import Tails
from distir_relax.sharding import Step, exchanges, plan


def lower_redistribute(
    emitter: PlacedEmitter, tails: Tails, value: Value, source: DTensorType, target: DTensorType
) -> Value:
    """Emit the ops that take the local tensors of `value` from `source` to `target`; the resulting value."""
    for step in plan(source, target, emitter.mesh):
        value = _STEPS[type(step.source), type(step.target)](emitter, tails, value, step)
    return value


def _gather(emitter: PlacedEmitter, tails: Tails, value: Value, step: Step) -> Value:
    assert isinstance(step.source, Shard)
    cut, dim = _cut(step.source), step.source.dim
    value = tails.trim(emitter, value, step.axis, step.source)
    sizes = cut.local_sizes()
    value = emitter.one("all_gather", value, axis=_axis(emitter.mesh, step.axis), dim=dim, sizes=sizes)
    return _slices(emitter, value, dim, _from_device_order(cut))


def _slice(emitter: PlacedEmitter, tails: Tails, value: Value, step: Step) -> Value:
    assert isinstance(step.target, Shard)
    cut, dim = _cut(step.target), step.target.dim
    value = _slices(emitter, value, dim, _to_device_order(cut))
    value = emitter.one("shard", value, **_mine(emitter, step.axis, dim, cut))
    return tails.pad(emitter, value, step.axis, step.target)


def _reduce(emitter: PlacedEmitter, tails: Tails, value: Value, step: Step) -> Value:
    assert isinstance(step.source, Partial)
    axis = _axis(emitter.mesh, step.axis)
    return emitter.one("all_reduce", value, axis=axis, op=step.source.reduction)


def _reduce_scatter(emitter: PlacedEmitter, tails: Tails, value: Value, step: Step) -> Value:
    assert isinstance(step.source, Partial)
    assert isinstance(step.target, Shard)
    cut, dim = _cut(step.target), step.target.dim
    value = _slices(emitter, value, dim, _to_device_order(cut))
    value = emitter.one("reduce_scatter", value, **_mine(emitter, step.axis, dim, cut), op=step.source.reduction)
    return tails.pad(emitter, value, step.axis, step.target)


def _exchange(emitter: PlacedEmitter, tails: Tails, value: Value, step: Step) -> Value:
    assert isinstance(step.source, Shard)
    assert isinstance(step.target, Shard)
    have, want = _cut(step.source), _cut(step.target)
    if not exchanges(step.source, step.target):
        whole = _gather(emitter, tails, value, Step(step.axis, step.source, Replicate()))
        return _slice(emitter, tails, whole, Step(step.axis, Replicate(), step.target))
    value = tails.trim(emitter, value, step.axis, step.source)
    value = emitter.one(
        "all_to_all",
        value,
        axis=_axis(emitter.mesh, step.axis),
        split_dim=step.target.dim,
        split_sizes=want.local_sizes(),
        concat_dim=step.source.dim,
        concat_sizes=have.local_sizes(),
        size=emitter.by_index(step.axis, want.local_sizes()),
    )
    return tails.pad(emitter, value, step.axis, step.target)


_STEPS = {
    (Shard, Replicate): _gather,
    (Replicate, Shard): _slice,
    (Partial, Replicate): _reduce,
    (Partial, Shard): _reduce_scatter,
    (Shard, Shard): _exchange,
}


def _axis(mesh: DeviceMesh, axis: int) -> str:
    return mesh.axes[axis]


def _cut(placement: Shard) -> Cut:
    assert placement.cut is not None
    return placement.cut


def _mine(emitter: PlacedEmitter, axis: int, dim: int, cut: Cut) -> dict[str, Attribute]:
    sizes = cut.local_sizes()
    return {"axis": _axis(emitter.mesh, axis), "dim": dim, "sizes": sizes, "size": emitter.by_index(axis, sizes)}


def _slices(emitter: PlacedEmitter, value: Value, dim: int, intervals: tuple[tuple[int, int], ...]) -> Value:
    if len(intervals) <= 1:
        return value
    shape = placed(value).shape
    assert sum(b - a for a, b in intervals) == shape[dim]
    return emitter.one("slices", value, dim=dim, intervals=intervals)


def _to_device_order(cut: Cut) -> tuple[tuple[int, int], ...]:
    """The dim's intervals, all of device 0 first, then all of device 1."""
    return _merged([interval for index in range(cut.ranks) for interval in cut.intervals(index)])


def _from_device_order(cut: Cut) -> tuple[tuple[int, int], ...]:
    """Where each stretch of the dim stands in a tensor that holds device 0's shard first, then device 1's."""
    found = []
    position = 0
    for index in range(cut.ranks):
        for start, stop in cut.intervals(index):
            found.append((start, (position, position + stop - start)))
            position += stop - start
    return _merged([interval for _, interval in sorted(found)])


def _merged(intervals: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
