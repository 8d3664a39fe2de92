"""Communication matrix: bytes sent between pairs of devices over a whole program.

Collectives are rings (`layout.collectives`). A hierarchical all-reduce sends as many bytes per device, to other
neighbors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.errors import ProfileError
from distir_relax.interpret.mesh_groups import axis_groups, mesh_of_axis
from distir_relax.ir import Function, Module, Op, PlacedType
from distir_relax.layout import Collective
from distir_relax.ops import OpDef, Trait, lookup
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.simulation.device_classes import Devices
from distir_relax.simulation.microbatch_expansion import expand_module

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CommunicationMatrix:
    """`bytes[i]` are sent from device `source[i]` to device `target[i]`; each pair occurs at most once."""

    source: Array
    target: Array
    bytes: Array

    def between(self, group: Sequence[int] | Array) -> Array:
        """Aggregate by groups: bytes from group i to group j, where device d is in ``group[d]``; i may equal j."""
        group_of = np.asarray(group)
        count = int(group_of.max()) + 1
        matrix = np.zeros((count, count))
        np.add.at(matrix, (group_of[self.source], group_of[self.target]), self.bytes)
        return matrix


def bytes_between(module: Module) -> CommunicationMatrix:
    """Compute the communication matrix of one run of a distributed program.

    Raises `VerificationError` for a program that lacks types, `ProfileError` for an unknown kind of communication.
    """
    counter = _Counter(expand_module(module))
    link_bytes: dict[_Links, float | Array] = {}
    for (number, onto), times in counter.ops_of(counter.module.main, None).items():
        for links, sent in counter.sent(counter.ops[number], onto):
            link_bytes[links] = link_bytes.get(links, 0.0) + times * sent
    totals: Counter[tuple[int, int]] = Counter()
    for links, sent in link_bytes.items():
        source, target = links.pairs()
        amounts = np.broadcast_to(sent, source.shape)
        for i, j, amount in zip(source.tolist(), target.tolist(), amounts.tolist(), strict=True):
            if i != j and amount:
                totals[i, j] += amount
    pairs = sorted(totals)
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return CommunicationMatrix(array[:, 0], array[:, 1], np.array([totals[pair] for pair in pairs], dtype=float))


@dataclass(frozen=True)
class Traffic:
    """Communication of one kind, along a mesh axis (empty for sends), in a run of a program.

    Its ops run `times` times, each set of devices by itself; `bytes` are those that all devices send together, None if
    the kind is unknown.
    """

    name: str
    axis: str
    times: int
    bytes: float | None


def traffic_by_kind(module: Module) -> list[Traffic]:
    """Sum up the communication of one run of a distributed program by op and mesh axis, most bytes first.

    Raises `VerificationError` for a program that lacks types.
    """
    counter = _Counter(expand_module(module))
    times: Counter[tuple[str, str]] = Counter()
    total: dict[tuple[str, str], float | None] = {}
    for (number, onto), count in counter.ops_of(counter.module.main, None).items():
        op = counter.ops[number]
        key = op.name, str(op.attrs.get("axis", ""))
        times[key] += count
        sent = _all_bytes(counter, op, onto)
        before = total.get(key, 0.0)
        total[key] = None if sent is None or before is None else before + count * sent
    rows = [Traffic(*key, times[key], total[key]) for key in times]
    return sorted(rows, key=lambda row: (-(row.bytes or 0.0), row.name, row.axis))


def _all_bytes(counter: _Counter, op: Op, onto: Devices | None) -> float | None:
    """Return the bytes that all devices of an op send to others; None for an unknown kind of communication."""
    total = 0.0
    try:
        for links, sent in counter.sent(op, onto):
            source, target = links.pairs()
            total += float(np.broadcast_to(sent, source.shape)[source != target].sum())
    except ProfileError:
        return None
    return total


@dataclass(frozen=True)
class _Links:
    """Pairs of devices, by form: rows are rings, rows exchange all-to-all, or two rows are paired."""

    form: str
    rows: tuple[Devices, ...]

    def pairs(self) -> tuple[Array, Array]:
        rows = np.array(self.rows, dtype=np.int64)
        if self.form == "pairs":
            return rows[0], rows[1]
        if self.form == "ring":
            return rows.reshape(-1), np.roll(rows, -1, axis=1).reshape(-1)
        count = rows.shape[1]
        return np.repeat(rows, count, axis=1).reshape(-1), np.tile(rows, (1, count)).reshape(-1)


@dataclass
class _Counter:
    """Counts runs of ops by device set, and the bytes that they send."""

    module: Module
    ops: dict[int, Op] = field(default_factory=dict)
    _cache: dict[tuple[str, Devices | None], Counter[tuple[int, Devices | None]]] = field(default_factory=dict)
    _rows: dict[tuple[str, Devices], tuple[Devices, ...]] = field(default_factory=dict)

    def ops_of(self, function: Function, onto: Devices | None) -> Counter[tuple[int, Devices | None]]:
        """Count the communication ops of a function on `onto`, including those of its callees."""
        key = (function.name, onto)
        if key in self._cache:
            return self._cache[key]
        counts: Counter[tuple[int, Devices | None]] = Counter()
        for op in function.ops:
            if op.callee:
                devices: Devices = op.attrs["devices"]  # type: ignore[assignment]
                counts.update(self.ops_of(self.module.function(op.callee), _map_devices(devices, onto)))
                continue
            entry = lookup(op.name, op.location)
            if Trait.COMMUNICATES in entry.traits:
                self.ops[id(op)] = op
                counts[id(op), onto] += 1
        self._cache[key] = counts
        return counts

    def sent(self, op: Op, onto: Devices | None) -> Iterator[tuple[_Links, float | Array]]:
        """Yield the links that an op uses, with the bytes on each of them, or a single number if equal."""
        entry = lookup(op.name, op.location)
        operand, result = op.operands[0].placed, op.results[0].placed
        source, target = _map_devices(operand.devices, onto), _map_devices(result.devices, onto)
        if Trait.TRANSFER in entry.traits:
            yield _Links("pairs", (source, target)), _local_bytes(operand)
            return
        rows = self._groups(str(op.attrs["axis"]), target)
        n = len(rows[0])
        sent_bytes = _by_row(_local_bytes(operand), source, rows)
        collective = entry.cost.collective
        if collective is None:
            raise ProfileError("the senders of a communication op without a collective are unknown", op.location)
        if collective is Collective.ALL_TO_ALL:
            yield _Links("all", rows), (sent_bytes[:, :, None] * _piece_fractions(op, entry, target, rows)).reshape(-1)
            return
        pieces = _by_row(_local_bytes(result), target, rows) if collective is Collective.REDUCE_SCATTER else sent_bytes
        total = sent_bytes if collective is Collective.ALL_REDUCE else pieces.sum(1, keepdims=True)
        yield _Links("ring", rows), collective.volume(n, total, pieces, np.roll(pieces, -1, axis=1)).reshape(-1)

    def _groups(self, axis: str, devices: Devices) -> tuple[Devices, ...]:
        key = (axis, devices)
        if key not in self._rows:
            rows = axis_groups(mesh_of_axis(self.module, axis), axis, devices)
            self._rows[key] = tuple(tuple(row) for row in rows.tolist())
        return self._rows[key]


def _piece_fractions(op: Op, entry: OpDef, devices: Devices, rows: tuple[Devices, ...]) -> Array:
    """Return the fraction of a device's data that it sends to each of its row: rows by senders by receivers."""
    n = len(rows[0])
    if entry.cost.pieces is None:
        return np.full((len(rows), n, n), 1 / n)
    index = {device: i for i, device in enumerate(devices)}
    fractions = np.zeros((len(rows), n, n))
    for r, row in enumerate(rows):
        for i, device in enumerate(row):
            pieces = np.array(entry.cost.pieces(local_attrs(op.attrs, index[device]), i), dtype=float)
            fractions[r, i] = pieces / max(pieces.sum(), 1.0)
    return fractions


def _local_bytes(kind: PlacedType) -> Array:
    """Return the bytes on each device of a type's set; a single number if equal."""
    if all(isinstance(size, int) for size in kind.shape):
        return np.array(float(kind.local(0).bytes))
    return np.array([float(kind.local(i).bytes) for i in range(len(kind.devices))])


def _by_row(local_bytes: Array, devices: Devices, rows: tuple[Devices, ...]) -> Array:
    shape = (len(rows), len(rows[0]))
    if local_bytes.ndim == 0:
        return np.full(shape, local_bytes)
    index = {device: i for i, device in enumerate(devices)}
    result: Array = local_bytes[np.array([[index[device] for device in row] for row in rows])]
    return result


def _map_devices(devices: Devices, onto: Devices | None) -> Devices:
    return devices if onto is None else tuple(onto[i] for i in devices)
