"""Halo exchange: sliding windows over a split dim, whose operand rows may be on other devices.

For each device, interval arithmetic gives the operand rows that its result rows depend on (`Window.reads`). Of these,
the device keeps those of its own shard and receives the others (the halo) by `send` from one or several devices; they
are concatenated in the order of rows, with rows from lower indices along the mesh axis first. The op then runs on
exactly these rows, with only the padding at the ends of the whole tensor, or with attributes that give their position
in it. A kernel of 3 over 5 rows on two devices::

    index 0    a0 a1 a2 | b3            sends a2, receives b3
    index 1         a2 | b3 b4          sends b3, receives a2

Sends over equal distances are combined into one op unless a device would both send and receive in it. So the number of
ops depends on how many neighbors a window overlaps, not on the number of devices. All devices process sends and
receives in program order, so there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

from distir_relax.ir import DTensorType, Op, Value, at_rank, per_rank
from distir_relax.layout import DeviceMesh, Placement, Shard, block_bounds, intersect
from distir_relax.lowering.distributed_builder import SpmdBuilder
from distir_relax.lowering.padding import Padding
from distir_relax.ops import PrefixWindow, Window, lookup


@dataclass(frozen=True, slots=True)
class SplitWindow:
    """A window whose dims are split along the mesh axes numbered `axes`.

    Devices are numbered in row-major order along these axes. `source` and `target` are the block bounds, one more than
    devices, in the dims of operand and result; `placements` is the operand's layout.
    """

    window: Window
    axes: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    placements: tuple[Placement, ...]

    def index(self, mesh: DeviceMesh, device: int) -> int:
        """Return the index of a device along the axes."""
        coordinates = mesh.coordinates(device)
        number = 0
        for axis in self.axes:
            number = number * mesh.shape[axis] + coordinates[axis]
        return number

    def needs(self) -> list[tuple[int, int]]:
        """Return the operand rows that each device needs."""
        return [self.window.reads(a, b) for a, b in pairwise(self.target)]

    def parts(self) -> list[tuple[int, ...]]:
        """Return for each device the position of its rows, as its op needs it."""
        return [self.window.part(a, b) for a, b in pairwise(self.target)]


def split_windows(op: Op, mesh: DeviceMesh) -> list[SplitWindow]:
    """Return the windows of an op of the sharded stage along whose dims it is split."""
    results = [v.dtensor for v in op.results]
    layouts = [v.dtensor for v in op.operands]
    if lookup(op.name, op.location).split.windowed is None:
        return []
    rule = lookup(op.name).rule_for([k.tensor for k in layouts], op.attrs, [k.tensor for k in results])
    result = []
    for window in rule.windows:
        layout = layouts[window.operand]
        axes = _axes(results[0], window.result_dim)
        if axes:
            assert axes == _axes(layout, window.operand_dim)
            bounds = _bounds(layout, window.operand_dim, mesh), _bounds(results[0], window.result_dim, mesh)
            # The rule has generic values of symbolic sizes.
            sized = replace(window, size=layout.shape[window.operand_dim])
            result.append(SplitWindow(sized, axes, *bounds, layout.placements))
    return result


def fetch(
    builder: SpmdBuilder, padding: Padding, operands: Sequence[Value], split: Sequence[SplitWindow]
) -> list[Value]:
    """Return the operands with the rows that each device needs under windows, fetched from other devices."""
    values = list(operands)
    hint = builder.hint
    for item in split:
        position = item.window.operand
        builder.hint = f"{operands[position].name}.trimmed"
        values[position] = padding.trim_all(builder, values[position], item.placements, set(item.axes), set())
    for item in split:
        position = item.window.operand
        values[position] = _exchange_halos(builder, values[position], item, operands[position].name)
    builder.hint = hint
    return values


def parts(mesh: DeviceMesh, split: Sequence[SplitWindow], devices: Sequence[int]) -> list[dict[int, tuple[int, ...]]]:
    """Return for each of `devices` the position of its part in each window: see `Window.part`."""
    parts_of_item = [(item, item.parts()) for item in split]
    return [{item.window.index: rows[item.index(mesh, device)] for item, rows in parts_of_item} for device in devices]


Rows = tuple[int, int]
"""The rows [start, stop) of a shard."""


@dataclass(frozen=True, slots=True)
class _Route:
    """A send pattern: the differences of device indices, in row-major order and along each axis.

    `parity` separates senders from receivers of the same pattern.
    """

    distance: int
    parity: int
    shift: tuple[int, ...]


def _exchange_halos(builder: SpmdBuilder, value: Value, split: SplitWindow, name: str) -> Value:
    """Return `value` with the rows that each device needs along one dim; name new values after `name`."""
    dim, mesh = split.window.operand_dim, builder.mesh
    received: list[tuple[int, Value]] = []
    routes = _transfers(split, mesh)
    for route, pieces in sorted(routes.items(), key=lambda item: (abs(item[0].distance), astuple(item[0]))):
        builder.hint = f"{name}.edge"
        part = _cut(builder, value, split, pieces)
        targets = _devices(mesh, split, {index + route.distance for index in pieces})
        builder.hint = f"{name}.halo"
        received.append((route.distance, builder.on(targets, "send", part)))
    builder.hint = f"{name}.rows"
    local = _cut(builder, value, split, dict(enumerate(_local_rows(split))))
    if not received:
        return local
    # Rows from lower indices come first: those sent over a larger positive distance.
    before = [v for distance, v in sorted(received, key=lambda item: -item[0]) if distance > 0]
    after = [v for distance, v in sorted(received, key=lambda item: -item[0]) if distance < 0]
    return builder.on(builder.devices, "concat", *before, local, *after, axis=dim)


def _transfers(split: SplitWindow, mesh: DeviceMesh) -> dict[_Route, dict[int, Rows]]:
    """Return for each route the rows of its shard that each source index sends.

    A constant shift preserves the order of devices, so the i-th source sends to the i-th target.
    """
    indices = list(itertools.product(*(range(mesh.shape[axis]) for axis in split.axes)))
    routes: dict[_Route, dict[int, Rows]] = defaultdict(dict)
    for target, (first, last) in enumerate(split.needs()):
        for source, (start, stop) in enumerate(pairwise(split.source)):
            common = _common(split, (first, last), (start, stop))
            if source != target and common:
                begin, end = common
                distance = target - source
                shift = tuple(b - a for a, b in zip(indices[source], indices[target], strict=True))
                route = _Route(distance, source // abs(distance) % 2, shift)
                routes[route][source] = (begin - start, end - start)
    return routes


def _local_rows(split: SplitWindow) -> list[Rows]:
    """Return the rows of its own shard that each index needs."""
    local_rows = []
    for (first, last), (start, stop) in zip(split.needs(), pairwise(split.source), strict=True):
        common = _common(split, (first, last), (start, stop))
        local_rows.append((common[0] - start, common[1] - start) if common else (0, 0))
    return local_rows


def _common(split: SplitWindow, needed: Rows, held: Rows) -> Rows | None:
    """Return the rows that are needed of those that are held, if any.

    Of a prefix, rows that symbolic sizes leave open are empty, as no row moves then. Raises `UndecidedSize` for others.
    """
    if isinstance(split.window, PrefixWindow):
        return next(iter(intersect([needed], [held])), None)
    begin, end = max(needed[0], held[0]), min(needed[1], held[1])
    return (begin, end) if begin < end else None


def _cut(builder: SpmdBuilder, value: Value, split: SplitWindow, pieces: dict[int, Rows]) -> Value:
    """Slice `value` on the devices with the given indices; return it unchanged if that is all of it."""
    dim = split.window.operand_dim
    devices = _devices(builder.mesh, split, pieces)
    rows = [pieces[split.index(builder.mesh, d)] for d in devices]
    type_ = value.placed
    positions = {device: index for index, device in enumerate(type_.devices)}
    sizes = [at_rank(type_.shape[dim], positions[d]) for d in devices]
    if devices == type_.devices and all(row == (0, n) for row, n in zip(rows, sizes, strict=True)):
        return value
    begin, end = per_rank([a for a, _ in rows]), per_rank([b for _, b in rows])
    return builder.on(devices, "strided_slice", value, axes=(dim,), begin=(begin,), end=(end,), strides=(1,))


def _devices(mesh: DeviceMesh, split: SplitWindow, indices: Container[int]) -> tuple[int, ...]:
    return tuple(d for d in mesh.devices if split.index(mesh, d) in indices)


def _axes(layout: DTensorType, dim: int) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.placements) if isinstance(p, Shard) and p.dim == dim)


def _bounds(layout: DTensorType, dim: int, mesh: DeviceMesh) -> tuple[int, ...]:
    bounds = block_bounds(layout.placements, dim, layout.shape[dim], mesh.shape)
    assert bounds is not None, f"{layout} is not split in blocks"
    return bounds
