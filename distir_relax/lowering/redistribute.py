"""Lowering of `redistribute` to collectives along mesh axes, including uneven and interleaved shards.

Each step works on one dim of the tensor that a group of devices has together: the whole dim, or if other mesh axes cut
it too, the group's part of it. A collective concatenates shards in device order. If shards have several intervals of
the dim (a fused QKV weight), that order differs from the order of the dim, and a local `slices` op reorders elements
before or after the collective.

A dim of a symbolic number of interleaved parts, such as a flattened batch of split sequences, ``batch*(a|b|c)``, is a
matrix with a part in each row: the step is one on its columns, which have one interval each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distir_relax.ir import Attribute, DeviceEquivalence, DTensorType, Value, mesh_classes
from distir_relax.layout import (
    Cut,
    Interval,
    Partial,
    Placement,
    Replicate,
    Segment,
    Shard,
    generic_value,
    in_matrix,
    interleaved_parts,
    intersect,
    local_intervals,
    local_length,
    total,
)
from distir_relax.lowering.distributed_builder import SpmdBuilder, merge_attrs
from distir_relax.lowering.padding import Padding
from distir_relax.sharding import Transition, plan

Pieces = list[list[Interval]]
"""For each index along a mesh axis, its intervals of a dim."""


def lower_redistribute(
    builder: SpmdBuilder, padding: Padding, value: Value, source: DTensorType, target: DTensorType
) -> Value:
    """Emit the ops that convert the local tensors of `value` from `source` to `target`; return the result."""
    if padding.mode != "ragged":
        return _lower(builder, padding, value, source, target)
    # The layers of a model repeat the same redistributions.
    return builder.memoized((source, target), value, lambda operand: _lower(builder, padding, operand, source, target))


def lower_transition(state: ReshardState, value: Value, step: Transition) -> Value:
    """Emit the ops of one step of a redistribution, for values without padding; return the result."""
    if (interleaved := _interleaved_dim(state, step)) is not None:
        value = _on_columns(state, value, step, *interleaved)
    else:
        value = _STEPS[type(step.source), type(step.target)](state, value, step)
    state.complete(step)
    return value


def _lower(builder: SpmdBuilder, padding: Padding, value: Value, source: DTensorType, target: DTensorType) -> Value:
    steps = plan(source, target, builder.mesh)
    axes = {step.axis for step in steps}
    dims = {p.dim for step in steps for p in (step.source, step.target) if isinstance(p, Shard)}
    value = padding.trim_all(builder, value, source.placements, axes, dims)
    state = ReshardState(builder, source.shape, list(source.placements))
    for step in steps:
        value = lower_transition(state, value, step)
    return padding.pad_all(builder, value, target.placements, axes, dims)


@dataclass(slots=True)
class ReshardState:
    """A tensor of global `shape` during a redistribution, with its current `placements`."""

    builder: SpmdBuilder
    shape: tuple[int, ...]
    placements: list[Placement]
    _pieces: dict[object, Pieces] = field(default_factory=dict)
    """Cache of `pieces` in the current step, shared by devices of one group."""

    def complete(self, step: Transition) -> None:
        """Update the placements after a step."""
        self.placements[step.axis] = step.target
        self._pieces.clear()

    def axis(self, step: Transition) -> str:
        """Return the name of the mesh axis of a step."""
        return self.builder.mesh.axes[step.axis]

    def index(self, step: Transition, device: int) -> int:
        """Return the index of a device along the step's mesh axis."""
        return self.builder.mesh.coordinates(device)[step.axis]

    def group_intervals(self, step: Transition, dim: int, device: int) -> list[Interval]:
        """Return the intervals of `dim` that the device's group along the step's axis has together."""
        others = [p for i, p in enumerate(self.placements) if i != step.axis]
        coordinates = self.builder.mesh.coordinates(device)
        return local_intervals(others, dim, self.shape[dim], [c for i, c in enumerate(coordinates) if i != step.axis])

    def pieces(self, step: Transition, placement: Placement, device: int) -> Pieces:
        """Return the intervals of each index along the step's axis, in the device's group, under `placement`."""
        cut, dim = _cut(placement)
        key = (id(placement), self.group_key(step, dim, device))
        if key not in self._pieces:
            group = self.group_intervals(step, dim, device)
            self._pieces[key] = [intersect(group, cut.intervals(i)) for i in range(cut.ranks)]
        return self._pieces[key]

    def group_key(self, step: Transition, dim: int, device: int) -> tuple[int, ...]:
        """Return a key that is equal for devices whose groups along the step's axis have the same part of `dim`."""
        coordinates = self.builder.mesh.coordinates(device)
        others = ((i, p) for i, p in enumerate(self.placements) if i != step.axis)
        return tuple(coordinates[i] for i, p in others if isinstance(p, Shard) and p.dim == dim)

    def classes(self, step: Transition) -> DeviceEquivalence:
        """Classify devices in a step by their indices along its axis and along the axes that cut the tensor."""
        axes = (i for i, p in enumerate(self.placements) if i == step.axis or isinstance(p, Shard))
        return mesh_classes(self.builder.mesh, tuple(axes))

    def by_device(self, step: Transition, attrs: Callable[[int], dict[str, Attribute]]) -> dict[str, Attribute]:
        """Merge attributes that may differ by device."""
        classes = self.classes(step)
        return merge_attrs([attrs(device) for device in classes.firsts], classes)

    def own_part(self, step: Transition, placement: Shard) -> dict[str, Attribute]:
        """Return the attributes of an op that leaves each device its own part."""

        def attrs(device: int) -> dict[str, Attribute]:
            sizes = _sizes(self.pieces(step, placement, device))
            return {"sizes": sizes, "size": sizes[self.index(step, device)]}

        return {"axis": self.axis(step), "dim": placement.dim, **self.by_device(step, attrs)}

    def slices(self, value: Value, step: Transition, dim: int, intervals: Callable[[int], list[Interval]]) -> Value:
        """Select the intervals `intervals(device)` of `dim` from `value`, in that order."""
        classes = self.classes(step)
        rows = [_merge_adjacent(intervals(device)) for device in classes.firsts]
        if all(len(row) <= 1 for row in rows):
            return value
        longest = max(map(len, rows))
        # The number of intervals must be equal on all devices: add empty ones.
        attrs = merge_attrs([{"intervals": (*row, *[(0, 0)] * (longest - len(row)))} for row in rows], classes)
        return self.builder.one("slices", value, dim=dim, **attrs)

    def to_device_order(self, value: Value, step: Transition, placement: Shard) -> Value:
        """Reorder the dim that `placement` cuts: all elements of device 0 first, then those of device 1."""
        return self.slices(
            value,
            step,
            placement.dim,
            lambda d: _positions(self.pieces(step, placement, d), self.group_intervals(step, placement.dim, d)),
        )

    def from_device_order(self, value: Value, step: Transition, placement: Shard) -> Value:
        """The inverse of `to_device_order`."""
        return self.slices(value, step, placement.dim, lambda d: _sorted_positions(self.pieces(step, placement, d)))


def _gather(state: ReshardState, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Shard)
    sizes = state.by_device(step, lambda d: {"sizes": _sizes(state.pieces(step, step.source, d))})
    value = state.builder.one("all_gather", value, axis=state.axis(step), dim=step.source.dim, **sizes)
    return state.from_device_order(value, step, step.source)


def _slice(state: ReshardState, value: Value, step: Transition) -> Value:
    assert isinstance(step.target, Shard)
    value = state.to_device_order(value, step, step.target)
    return state.builder.one("shard", value, **state.own_part(step, step.target))


def _reduce(state: ReshardState, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Partial)
    return state.builder.one("all_reduce", value, axis=state.axis(step), op=step.source.reduction)


def _reduce_scatter(state: ReshardState, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Partial)
    assert isinstance(step.target, Shard)
    value = state.to_device_order(value, step, step.target)
    return state.builder.one("reduce_scatter", value, **state.own_part(step, step.target), op=step.source.reduction)


def _exchange(state: ReshardState, value: Value, step: Transition) -> Value:
    assert isinstance(step.source, Shard)
    assert isinstance(step.target, Shard)
    if step.source.dim == step.target.dim:
        return _resplit(state, value, step)
    source, target = step.source, step.target
    value = state.to_device_order(value, step, target)

    def attrs(device: int) -> dict[str, Attribute]:
        sizes = _sizes(state.pieces(step, target, device))
        source_sizes = _sizes(state.pieces(step, source, device))
        return {"split_sizes": sizes, "concat_sizes": source_sizes, "size": sizes[state.index(step, device)]}

    value = state.builder.one(
        "all_to_all",
        value,
        axis=state.axis(step),
        split_dim=target.dim,
        concat_dim=source.dim,
        **state.by_device(step, attrs),
    )
    return state.from_device_order(value, step, source)


def _resplit(state: ReshardState, value: Value, step: Transition) -> Value:
    """Exchange pieces between two cuts of one dim: each device sends each other its share."""
    _, dim = _cut(step.source)

    cells_of_group: dict[tuple[int, ...], list[Pieces]] = {}

    def exchanged_pieces(device: int) -> list[Pieces]:
        group_key = state.group_key(step, dim, device)
        if group_key not in cells_of_group:
            old, new = (state.pieces(step, step.source, device), state.pieces(step, step.target, device))
            cells_of_group[group_key] = [[intersect(a, b) for b in new] for a in old]
        return cells_of_group[group_key]

    def send_order(device: int) -> list[Interval]:
        row = exchanged_pieces(device)[state.index(step, device)]
        return _positions(row, state.pieces(step, step.source, device)[state.index(step, device)])

    def receive_order(device: int) -> list[Interval]:
        return _sorted_positions([row[state.index(step, device)] for row in exchanged_pieces(device)])

    def attrs(device: int) -> dict[str, Attribute]:
        sizes = tuple(_sizes(row) for row in exchanged_pieces(device))
        return {"pieces": sizes, "size": sum(row[state.index(step, device)] for row in sizes)}

    value = state.slices(value, step, dim, send_order)
    value = state.builder.one("resplit", value, axis=state.axis(step), dim=dim, **state.by_device(step, attrs))
    return state.slices(value, step, dim, receive_order)


def _as_term(state: ReshardState, value: Value, step: Transition) -> Value:
    """Embed a shard in zeros, as a term of a sum."""
    source = step.source
    assert isinstance(source, Shard)
    assert step.target == Partial("sum")
    rank = len(state.shape)

    def attrs(device: int) -> dict[str, Attribute]:
        sizes, me = _sizes(state.pieces(step, source, device)), state.index(step, device)
        low, high = [0] * rank, [0] * rank
        low[source.dim], high[source.dim] = sum(sizes[:me]), sum(sizes[me + 1 :])
        return {"low": tuple(low), "high": tuple(high)}

    number = 0.0 if "float" in value.placed.dtype else 0
    value = state.builder.one("pad", value, value=number, **state.by_device(step, attrs))
    return state.from_device_order(value, step, source)


def _replicated_as_term(state: ReshardState, value: Value, step: Transition) -> Value:
    """Convert a replicated value to a term: itself for mean, max and min; for a sum, only on the first device."""
    if step.target != Partial("sum"):
        return value
    first_only = Shard(0, Cut.of(1, *[0] * (state.builder.mesh.shape[step.axis] - 1)))
    row_state = ReshardState(state.builder, (1,), state.placements)
    value = state.builder.one("reshape", value, shape=(1,))
    value = _slice(row_state, value, Transition(step.axis, step.source, first_only))
    value = _as_term(row_state, value, Transition(step.axis, first_only, step.target))
    return state.builder.one("reshape", value, shape=())


_STEPS: dict[tuple[type, type], Callable[[ReshardState, Value, Transition], Value]] = {
    (Shard, Replicate): _gather,
    (Replicate, Shard): _slice,
    (Partial, Replicate): _reduce,
    (Partial, Shard): _reduce_scatter,
    (Shard, Shard): _exchange,
    (Shard, Partial): _as_term,
    (Replicate, Partial): _replicated_as_term,
}


def _interleaved_dim(state: ReshardState, step: Transition) -> tuple[int, Segment] | None:
    """Return a dim of the step that is cut into a symbolic number of interleaved parts, and those parts."""
    for end in (step.source, step.target):
        if isinstance(end, Shard) and (parts := interleaved_parts((end, *state.placements), end.dim)):
            return end.dim, parts
    return None


def _on_columns(state: ReshardState, value: Value, step: Transition, dim: int, parts: Segment) -> Value:
    """Emit the ops of a step on `dim` as those on a matrix whose rows are the parts of `dim`."""
    source, target, *placements = (in_matrix(p, dim, parts) for p in (step.source, step.target, *state.placements))
    shape = (*state.shape[:dim], parts.repeat, total(parts.sizes), *state.shape[dim + 1 :])
    matrix = ReshardState(state.builder, shape, placements)

    def split(local: tuple[int, ...], device: int) -> tuple[int, ...]:
        coordinates = state.builder.mesh.coordinates(device)
        rows, columns = (local_length(placements, d, shape[d], coordinates) for d in (dim, dim + 1))
        return (*local[:dim], rows, columns, *local[dim + 1 :])

    def join(local: tuple[int, ...], device: int) -> tuple[int, ...]:
        return (*local[:dim], local[dim] * local[dim + 1], *local[dim + 2 :])

    value = _reshape(state, value, step, split)
    value = lower_transition(matrix, value, Transition(step.axis, source, target))
    return _reshape(state, value, step, join)


def _reshape(
    state: ReshardState,
    value: Value,
    step: Transition,
    shape: Callable[[tuple[int, ...], int], tuple[int, ...]],
) -> Value:
    """Reshape the local tensors of all devices, each to `shape(its shape, device)`."""
    shapes = state.by_device(step, lambda d: {"shape": shape(value.placed.local(d).shape, d)})
    return state.builder.one("reshape", value, **shapes)


def _cut(placement: Placement) -> tuple[Cut, int]:
    assert isinstance(placement, Shard)
    assert placement.cut is not None
    return placement.cut, placement.dim


def _sizes(pieces: Pieces) -> tuple[int, ...]:
    return tuple(sum(b - a for a, b in piece) for piece in pieces)


def _positions(pieces: Pieces, intervals: Sequence[Interval]) -> list[Interval]:
    """Return the positions of `pieces`, in order, in a tensor that consists of `intervals`.

    Symbolic pieces are in the interval that they are in for generic values: cuts are nested for all values.
    """
    starts: list[tuple[Interval, int]] = []
    position = 0
    for start, stop in intervals:
        starts.append(((start, stop), position - start))
        position += stop - start
    positions = []
    for piece in pieces:
        for a, b in piece:
            at = generic_value(a)
            shift = next(s for (start, stop), s in starts if generic_value(start) <= at < generic_value(stop))
            positions.append((a + shift, b + shift))
    return positions


def _sorted_positions(pieces: Pieces) -> list[Interval]:
    """Return the positions of all intervals, in order of the dim, in a tensor that concatenates the pieces."""
    positions = []
    position = 0
    for piece in pieces:
        for start, stop in piece:
            positions.append((start, (position, position + stop - start)))
            position += stop - start
    return [interval for _, interval in sorted(positions, key=lambda item: generic_value(item[0]))]


def _merge_adjacent(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
