"""How many bytes go from which device to which, over a whole program.

Collectives are counted as rings (`layout.collectives`). An all-reduce in two levels sends as many bytes a device, to
other neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.analysis.device_classes import Devices, groups_along, mesh_with
from distir_relax.analysis.microbatch_expansion import with_all_ops
from distir_relax.errors import ProfileError
from distir_relax.ir import Function, Module, Op, PlacedType
from distir_relax.layout import Collective
from distir_relax.ops import OpDef, Trait, lookup
from distir_relax.ops.table.type_checks import local_attrs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CommunicationMatrix:
    """`bytes[i]` go from device `source[i]` to device `target[i]`; each pair of devices is there once at most."""

    source: Array
    target: Array
    bytes: Array

    def between(self, group: Sequence[int] | Array) -> Array:
        """The bytes from group i of devices to group j, device d being in group ``group[d]``; inside one as well."""
        number = np.asarray(group)
        count = int(number.max()) + 1
        found = np.zeros((count, count))
        np.add.at(found, (number[self.source], number[self.target]), self.bytes)
        return found


def bytes_between(module: Module) -> CommunicationMatrix:
    """What the devices of a program of the distributed stage send to each other in one run of it.

    Raises `VerificationError` for a program that lacks types, `ProfileError` for a communication of an unknown kind.
    """
    counter = _Counter(with_all_ops(module))
    total: dict[_Links, float | Array] = {}
    for (number, onto), times in counter.ops_of(counter.module.main, None).items():
        for links, sent in counter.sent(counter.ops[number], onto):
            total[links] = total.get(links, 0.0) + times * sent
    found: Counter[tuple[int, int]] = Counter()
    for links, sent in total.items():
        source, target = links.pairs()
        amounts = np.broadcast_to(sent, source.shape)
        for i, j, amount in zip(source.tolist(), target.tolist(), amounts.tolist(), strict=True):
            if i != j and amount:
                found[i, j] += amount
    ordered = sorted(found)
    pairs = np.array(ordered, dtype=np.int64).reshape(-1, 2)
    return CommunicationMatrix(pairs[:, 0], pairs[:, 1], np.array([found[pair] for pair in ordered], dtype=float))


@dataclass(frozen=True)
class _Links:
    """Pairs of devices: rows of devices in rings, rows each of which sends to each, or two rows side by side."""

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
    """Counts how often each op runs on which devices, and what it sends."""

    module: Module
    ops: dict[int, Op] = field(default_factory=dict)
    _known: dict[tuple[str, Devices | None], Counter[tuple[int, Devices | None]]] = field(default_factory=dict)
    _rows: dict[tuple[str, Devices], tuple[Devices, ...]] = field(default_factory=dict)

    def ops_of(self, function: Function, onto: Devices | None) -> Counter[tuple[int, Devices | None]]:
        """The communications of a function on `onto` and of those it calls, by how often they run."""
        key = (function.name, onto)
        if key in self._known:
            return self._known[key]
        found: Counter[tuple[int, Devices | None]] = Counter()
        for op in function.ops:
            if op.callee:
                devices: Devices = op.attrs["devices"]  # type: ignore[assignment]
                found.update(self.ops_of(self.module.function(op.callee), _mapped(devices, onto)))
                continue
            entry = lookup(op.name, op.location)
            if Trait.COMMUNICATES in entry.traits:
                self.ops[id(op)] = op
                found[id(op), onto] += 1
        self._known[key] = found
        return found

    def sent(self, op: Op, onto: Devices | None) -> Iterator[tuple[_Links, float | Array]]:
        """The links that an op uses and the bytes on each of them, or on all where those are equal."""
        entry = lookup(op.name, op.location)
        operand, result = op.operands[0].placed, op.results[0].placed
        source, target = _mapped(operand.devices, onto), _mapped(result.devices, onto)
        if Trait.TRANSFER in entry.traits:
            yield _Links("pairs", (source, target)), _held(operand)
            return
        rows = self._groups(str(op.attrs["axis"]), target)
        n = len(rows[0])
        held = _by_row(_held(operand), source, rows)
        collective = entry.cost.collective
        if collective is None:
            raise ProfileError("it is not known who sends what in a communication without a collective", op.location)
        if collective is Collective.ALL_TO_ALL:
            yield _Links("all", rows), (held[:, :, None] * _shares(op, entry, target, rows)).reshape(-1)
            return
        pieces = _by_row(_held(result), target, rows) if collective is Collective.REDUCE_SCATTER else held
        whole = held if collective is Collective.ALL_REDUCE else pieces.sum(1, keepdims=True)
        yield _Links("ring", rows), collective.sends_of(n, whole, pieces, np.roll(pieces, -1, axis=1)).reshape(-1)

    def _groups(self, axis: str, devices: Devices) -> tuple[Devices, ...]:
        key = (axis, devices)
        if key not in self._rows:
            rows = groups_along(mesh_with(self.module, axis), axis, devices)
            self._rows[key] = tuple(tuple(row) for row in rows.tolist())
        return self._rows[key]


def _shares(op: Op, entry: OpDef, devices: Devices, rows: tuple[Devices, ...]) -> Array:
    """Of what a device of a row holds, the share that it sends to each of the row: rows by senders by receivers."""
    n = len(rows[0])
    if entry.cost.pieces is None:
        return np.full((len(rows), n, n), 1 / n)
    place = {device: i for i, device in enumerate(devices)}
    found = np.zeros((len(rows), n, n))
    for r, row in enumerate(rows):
        for i, device in enumerate(row):
            pieces = np.array(entry.cost.pieces(local_attrs(op.attrs, place[device]), i), dtype=float)
            found[r, i] = pieces / max(pieces.sum(), 1.0)
    return found


def _held(kind: PlacedType) -> Array:
    """The bytes that each device of a type's set holds; a single number where all hold as many."""
    if all(isinstance(size, int) for size in kind.shape):
        return np.array(float(kind.local(0).bytes))
    return np.array([float(kind.local(i).bytes) for i in range(len(kind.devices))])


def _by_row(held: Array, devices: Devices, rows: tuple[Devices, ...]) -> Array:
    shape = (len(rows), len(rows[0]))
    if held.ndim == 0:
        return np.full(shape, held)
    place = {device: i for i, device in enumerate(devices)}
    found: Array = held[np.array([[place[device] for device in row] for row in rows])]
    return found


def _mapped(devices: Devices, onto: Devices | None) -> Devices:
    return devices if onto is None else tuple(onto[i] for i in devices)
