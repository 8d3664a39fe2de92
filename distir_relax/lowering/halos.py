"""Sliding windows over a split dim: each device fetches the rows that it lacks from those that hold them.

For each device, interval arithmetic says which rows of the operand its rows of the result are made from
(`Window.reads`). What it holds of them it keeps, the rest comes by `send` from one or several others, and is joined in
the order of the rows: what a lower index along the mesh axis sends goes first. Then the op runs on just these rows,
with the padding that is left at the ends of the whole tensor. A kernel of 3 over 5 rows on two devices::

    index 0    a0 a1 a2 | b3            sends a2, receives b3
    index 1         a2 | b3 b4          sends b3, receives a2

Sends from devices that are equally far from their targets are one op, as long as no device both sends and receives in
it; so there are as many as windows overlap neighbours, whatever the number of devices. Program order is the schedule,
and every device passes its sends and receives in that order, so none waits for another in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from distir_relax.ir import DeviceMesh, DTensorType, Op, Shard, Size, Value, per_rank
from distir_relax.lowering.emitter import PlacedEmitter
from distir_relax.ops.placed import placed
from distir_relax.lowering.tails import Tails
from distir_relax.ops import Window, lookup


@dataclass(frozen=True, slots=True)
class SplitWindow:
    """A window whose dims are split along mesh axis number `axis`, as `source` and `target` say."""

    window: Window
    axis: int
    source: Shard
    target: Shard

    def starts(self) -> tuple[int, ...]:
        """Where the operand's shard of each index along the axis begins; the last one ends at the last number."""
        return _ends(self.source)

    def needs(self) -> list[tuple[int, int]]:
        """The rows of the operand that each index along the axis needs."""
        ends = _ends(self.target)
        return [self.window.reads(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def padding(self) -> list[tuple[int, int]]:
        """The padding at both ends of the rows that each index along the axis needs."""
        ends = _ends(self.target)
        return [self.window.padding(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def split_windows(op: Op) -> list[SplitWindow]:
    """The windows of an op of the sharded stage along whose dims it is split."""
    results = [_dtensor(v) for v in op.results]
    kinds = [_dtensor(v) for v in op.operands]
    if lookup(op.name, op.location).padded is None:
        return []
    rule = lookup(op.name).rule_for([k.tensor for k in kinds], op.attrs, [k.tensor for k in results])
    found = []
    for window in rule.windows:
        pairs = zip(kinds[window.operand].placements, results[0].placements, strict=True)
        for axis, (source, target) in enumerate(pairs):
            if isinstance(target, Shard) and target.dim == window.result_dim:
                assert isinstance(source, Shard)
                assert source.dim == window.operand_dim
                found.append(SplitWindow(window, axis, source, target))
    return found


def fetch(emitter: PlacedEmitter, tails: Tails, operands: Sequence[Value], split: Sequence[SplitWindow]) -> list[Value]:
    """The operands, those under windows with just the rows that each device needs, fetched from where they are."""
    moved = list(operands)
    hint = emitter.hint
    for item in split:
        position = item.window.operand
        emitter.hint = f"{operands[position].name}.trimmed"
        moved[position] = tails.trim(emitter, moved[position], item.axis, item.source)
    for item in split:
        position = item.window.operand
        moved[position] = _exchange(emitter, moved[position], item, operands[position].name)
    emitter.hint = hint
    return moved


def paddings(emitter: PlacedEmitter, split: Sequence[SplitWindow]) -> dict[int, tuple[Size, Size]]:
    """For each window, the padding at its low and its high end, device by device."""
    found: dict[int, tuple[Size, Size]] = {}
    for item in split:
        low, high = zip(*item.padding(), strict=True)
        found[item.window.index] = emitter.by_index(item.axis, low), emitter.by_index(item.axis, high)
    return found


Piece = tuple[int, int]
"""The rows [start, stop) of a shard."""


def _exchange(emitter: PlacedEmitter, value: Value, split: SplitWindow, name: str) -> Value:
    """`value` with the rows that each device needs along one dim; new values are named after `name`."""
    dim = split.window.operand_dim
    received: list[tuple[int, Value]] = []
    for (distance, _), pieces in sorted(_transfers(split).items(), key=lambda item: (abs(item[0][0]), item[0])):
        emitter.hint = f"{name}.edge"
        part = _cut(emitter, value, dim, split.axis, pieces)
        targets = _devices(emitter.mesh, split.axis, [index + distance for index in pieces])
        emitter.hint = f"{name}.halo"
        received.append((distance, emitter.on(targets, "send", part)))
    emitter.hint = f"{name}.rows"
    own = _cut(emitter, value, dim, split.axis, dict(enumerate(_kept(split))))
    if not received:
        return own
    # The rows of a lower index, which lies a larger distance before the device, go first.
    before = [v for distance, v in sorted(received, key=lambda item: -item[0]) if distance > 0]
    after = [v for distance, v in sorted(received, key=lambda item: -item[0]) if distance < 0]
    return emitter.on(emitter.devices, "concat", *before, own, *after, axis=dim)


def _transfers(split: SplitWindow) -> dict[tuple[int, int], dict[int, Piece]]:
    """What is sent: by (distance along the axis, parity), the rows of its shard that each sending index gives.

    Two parities keep those who send apart from those who receive.
    """
    starts = split.starts()
    found: dict[tuple[int, int], dict[int, Piece]] = defaultdict(dict)
    for target, (first, last) in enumerate(split.needs()):
        for source, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            begin, end = max(first, start), min(last, stop)
            if source != target and begin < end:
                distance = target - source
                found[distance, source // abs(distance) % 2][source] = (begin - start, end - start)
    return found


def _kept(split: SplitWindow) -> list[Piece]:
    """The rows of its own shard that each index needs."""
    starts = split.starts()
    kept = []
    for (first, last), start, stop in zip(split.needs(), starts, starts[1:], strict=False):
        begin, end = max(first, start), min(last, stop)
        kept.append((begin - start, end - start) if begin < end else (0, 0))
    return kept


def _cut(emitter: PlacedEmitter, value: Value, dim: int, axis: int, pieces: dict[int, Piece]) -> Value:
    """Rows of `value` on the devices at some indices along a mesh axis; itself where that is all of it."""
    devices = _devices(emitter.mesh, axis, list(pieces))
    rows = [pieces[emitter.mesh.coordinates(d)[axis]] for d in devices]
    kind = placed(value)
    held = [kind.local(kind.devices.index(d)).shape[dim] for d in devices]
    if devices == kind.devices and all(row == (0, n) for row, n in zip(rows, held, strict=True)):
        return value
    begin, end = per_rank([a for a, _ in rows]), per_rank([b for _, b in rows])
    return emitter.on(devices, "strided_slice", value, axes=(dim,), begin=(begin,), end=(end,), strides=(1,))


def _devices(mesh: DeviceMesh, axis: int, indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(mesh.size) if mesh.coordinates(d)[axis] in indices)


def _ends(placement: Shard) -> tuple[int, ...]:
    assert placement.cut is not None
    assert placement.cut.is_block
    sizes = placement.cut.local_sizes()
    return tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))


def _dtensor(value: Value) -> DTensorType:
    assert isinstance(value.type, DTensorType), f"{value}: {value.type}"
    return value.type
