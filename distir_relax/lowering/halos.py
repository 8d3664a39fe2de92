"""Sliding windows over a split dim: each device fetches the rows that it lacks from those that hold them.

For each device, interval arithmetic says which rows of the operand its rows of the result are made from
(`Window.reads`). What it holds of them it keeps, the rest comes by `send` from one or several others, and is joined in
the order of the rows: what a lower index along the mesh axis sends goes first. Then the op runs on just these rows,
with the padding that is left at the ends of the whole tensor, or told where in the whole its part lies. A kernel of 3
over 5 rows on two devices::

    index 0    a0 a1 a2 | b3            sends a2, receives b3
    index 1         a2 | b3 b4          sends b3, receives a2

Sends from devices that are equally far from their targets are one op, as long as no device both sends and receives in
it; so there are as many as windows overlap neighbours, whatever the number of devices. Program order is the schedule,
and every device passes its sends and receives in that order, so none waits for another in a circle.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from distir_relax.ir import DTensorType, Op, Value, at_rank, per_rank
from distir_relax.layout import DeviceMesh, Placement, Shard, block_bounds
from distir_relax.lowering.distributed_builder import PlacedEmitter
from distir_relax.lowering.padding import Tails
from distir_relax.ops import Window, lookup


@dataclass(frozen=True, slots=True)
class SplitWindow:
    """A window whose dims are split along the mesh axes numbered `axes`.

    Devices are counted row by row along these axes. `source` and `target` are where the block of each begins in the
    operand's dim and in the result's, and the end of the last; `placements` is how the operand lies.
    """

    window: Window
    axes: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    placements: tuple[Placement, ...]

    def index(self, mesh: DeviceMesh, device: int) -> int:
        """The number of a device along the axes."""
        coordinates = mesh.coordinates(device)
        number = 0
        for axis in self.axes:
            number = number * mesh.shape[axis] + coordinates[axis]
        return number

    def needs(self) -> list[tuple[int, int]]:
        """The rows of the operand that each device needs."""
        return [self.window.reads(a, b) for a, b in pairwise(self.target)]

    def parts(self) -> list[tuple[int, ...]]:
        """What each device's op must know of the rows that it needs."""
        return [self.window.part(a, b) for a, b in pairwise(self.target)]


def split_windows(op: Op, mesh: DeviceMesh) -> list[SplitWindow]:
    """The windows of an op of the sharded stage along whose dims it is split."""
    results = [v.dtensor for v in op.results]
    kinds = [v.dtensor for v in op.operands]
    if lookup(op.name, op.location).split.windowed is None:
        return []
    rule = lookup(op.name).rule_for([k.tensor for k in kinds], op.attrs, [k.tensor for k in results])
    found = []
    for window in rule.windows:
        kind = kinds[window.operand]
        axes = _axes(results[0], window.result_dim)
        if axes:
            assert axes == _axes(kind, window.operand_dim)
            bounds = _bounds(kind, window.operand_dim, mesh), _bounds(results[0], window.result_dim, mesh)
            found.append(SplitWindow(window, axes, *bounds, kind.placements))
    return found


def fetch(emitter: PlacedEmitter, tails: Tails, operands: Sequence[Value], split: Sequence[SplitWindow]) -> list[Value]:
    """The operands, those under windows with just the rows that each device needs, fetched from where they are."""
    moved = list(operands)
    hint = emitter.hint
    for item in split:
        position = item.window.operand
        emitter.hint = f"{operands[position].name}.trimmed"
        moved[position] = tails.trim_all(emitter, moved[position], item.placements, set(item.axes), set())
    for item in split:
        position = item.window.operand
        moved[position] = _exchange(emitter, moved[position], item, operands[position].name)
    emitter.hint = hint
    return moved


def parts(mesh: DeviceMesh, split: Sequence[SplitWindow], devices: Sequence[int]) -> list[dict[int, tuple[int, ...]]]:
    """For each of `devices`, what its op must know of its part along each window: see `Window.part`."""
    known = [(item, item.parts()) for item in split]
    return [{item.window.index: rows[item.index(mesh, device)] for item, rows in known} for device in devices]


Piece = tuple[int, int]
"""The rows [start, stop) of a shard."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way from one device to another: the difference of their numbers, and of their indices along each axis.

    Those who send and those who receive over the same way are of two parities.
    """

    distance: int
    parity: int
    shift: tuple[int, ...]


def _exchange(emitter: PlacedEmitter, value: Value, split: SplitWindow, name: str) -> Value:
    """`value` with the rows that each device needs along one dim; new values are named after `name`."""
    dim, mesh = split.window.operand_dim, emitter.mesh
    received: list[tuple[int, Value]] = []
    ways = _transfers(split, mesh)
    for way, pieces in sorted(ways.items(), key=lambda item: (abs(item[0].distance), astuple(item[0]))):
        emitter.hint = f"{name}.edge"
        part = _cut(emitter, value, split, pieces)
        targets = _devices(mesh, split, {index + way.distance for index in pieces})
        emitter.hint = f"{name}.halo"
        received.append((way.distance, emitter.on(targets, "send", part)))
    emitter.hint = f"{name}.rows"
    own = _cut(emitter, value, split, dict(enumerate(_kept(split))))
    if not received:
        return own
    # The rows of a lower index, which lies a larger distance before the device, go first.
    before = [v for distance, v in sorted(received, key=lambda item: -item[0]) if distance > 0]
    after = [v for distance, v in sorted(received, key=lambda item: -item[0]) if distance < 0]
    return emitter.on(emitter.devices, "concat", *before, own, *after, axis=dim)


def _transfers(split: SplitWindow, mesh: DeviceMesh) -> dict[_Way, dict[int, Piece]]:
    """What is sent: by way, the rows of its shard that each sending index gives.

    Devices that are shifted alike are in the same order before and after, so the first sends to the first.
    """
    places = list(itertools.product(*(range(mesh.shape[axis]) for axis in split.axes)))
    found: dict[_Way, dict[int, Piece]] = defaultdict(dict)
    for target, (first, last) in enumerate(split.needs()):
        for source, (start, stop) in enumerate(pairwise(split.source)):
            begin, end = max(first, start), min(last, stop)
            if source != target and begin < end:
                distance = target - source
                shift = tuple(b - a for a, b in zip(places[source], places[target], strict=True))
                way = _Way(distance, source // abs(distance) % 2, shift)
                found[way][source] = (begin - start, end - start)
    return found


def _kept(split: SplitWindow) -> list[Piece]:
    """The rows of its own shard that each index needs."""
    kept = []
    for (first, last), (start, stop) in zip(split.needs(), pairwise(split.source), strict=True):
        begin, end = max(first, start), min(last, stop)
        kept.append((begin - start, end - start) if begin < end else (0, 0))
    return kept


def _cut(emitter: PlacedEmitter, value: Value, split: SplitWindow, pieces: dict[int, Piece]) -> Value:
    """Rows of `value` on the devices of some numbers; itself where that is all of it."""
    dim = split.window.operand_dim
    devices = _devices(emitter.mesh, split, pieces)
    rows = [pieces[split.index(emitter.mesh, d)] for d in devices]
    kind = value.placed
    places = {device: index for index, device in enumerate(kind.devices)}
    held = [at_rank(kind.shape[dim], places[d]) for d in devices]
    if devices == kind.devices and all(row == (0, n) for row, n in zip(rows, held, strict=True)):
        return value
    begin, end = per_rank([a for a, _ in rows]), per_rank([b for _, b in rows])
    return emitter.on(devices, "strided_slice", value, axes=(dim,), begin=(begin,), end=(end,), strides=(1,))


def _devices(mesh: DeviceMesh, split: SplitWindow, indices: Container[int]) -> tuple[int, ...]:
    return tuple(d for d in mesh.devices if split.index(mesh, d) in indices)


def _axes(kind: DTensorType, dim: int) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(kind.placements) if isinstance(p, Shard) and p.dim == dim)


def _bounds(kind: DTensorType, dim: int, mesh: DeviceMesh) -> tuple[int, ...]:
    bounds = block_bounds(kind.placements, dim, kind.shape[dim], mesh.shape)
    assert bounds is not None, f"{kind} is not split in blocks"
    return bounds
