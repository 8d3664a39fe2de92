"""Which devices do the same all along: they are simulated as one.

Two devices are of one class when they are as fast and have as much memory, and every op of the program treats them
alike: the same shapes, communication with devices of the same classes over the same levels of links. This is the
coarsest equitable partition, found by refining: devices are told apart by what is known of them, then by the classes of
those they communicate with, until nothing changes. So the cost of a simulation depends on the stages of a program and
not on how many devices each has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.analysis.memory_categories import assembled_outputs
from distir_relax.cost.profile import Profile
from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, PerRank, PlacedType
from distir_relax.layout import DeviceMesh
from distir_relax.ops import Trait, lookup

Devices = tuple[int, ...]
Array = npt.NDArray[Any]


@dataclass
class DeviceClasses:
    """The classes of a module's devices: `of[d]` is the class of device `d`, `members[c]` the devices of a class."""

    module: Module
    profile: Profile
    of: Array = field(init=False)
    members: list[Array] = field(init=False)
    _mapped: dict[tuple[int, int], Devices] = field(default_factory=dict)
    _equal: dict[Devices, Devices] = field(default_factory=dict)
    _alive: dict[int, Devices] = field(default_factory=dict)
    _groups: dict[tuple[str, int], Array] = field(default_factory=dict)
    _indices: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of, facts = self._collect()
        self._refine(facts)
        order = np.argsort(self.of, kind="stable")
        self.members = np.split(order, np.flatnonzero(np.diff(self.of[order])) + 1)

    @property
    def count(self) -> int:
        """The number of classes."""
        return len(self.members)

    def mapped(self, inside: Devices, onto: Devices | None) -> Devices:
        """Devices of a function as those of the program; equal ones are the same object."""
        key = (id(inside), id(onto))
        found = self._mapped.get(key)
        if found is None:
            found = inside if onto is None else tuple(onto[i] for i in inside)
            found = self._mapped[key] = self._equal.setdefault(found, found)
            for devices in (inside, onto or ()):
                self._alive[id(devices)] = devices
        return found

    def index(self, devices: Devices) -> dict[int, int]:
        """Where each device stands in a device set."""
        found = self._indices.get(id(devices))
        if found is None:
            self._alive[id(devices)] = devices
            found = self._indices[id(devices)] = {device: i for i, device in enumerate(devices)}
        return found

    def groups(self, axis: str, devices: Devices) -> Array:
        """The groups of `devices` along a mesh axis, one a row. Raises `VerificationError` for a group in part."""
        key = (axis, id(devices))
        found = self._groups.get(key)
        if found is None:
            self._alive[id(devices)] = devices
            found = self._groups[key] = groups_along(mesh_with(self.module, axis), axis, devices)
        return found

    def _collect(self) -> tuple[Array, _Facts]:
        facts = _Facts()
        seen: set[tuple[str, int]] = set()
        highest = max((mesh.size for mesh in self.module.meshes), default=1)

        def visit(function: Function, onto: Devices | None) -> None:
            if (function.name, id(onto)) in seen:
                return
            seen.add((function.name, id(onto)))
            for kind in {id(kind): kind for kind in _types(function)}.values():
                devices = self.mapped(kind.devices, onto)
                facts.sets[id(devices)] = devices
                for size in kind.shape:
                    if isinstance(size, PerRank):
                        facts.sizes[id(devices), size] = devices
            for op in function.ops:
                if op.callee:
                    inner: Devices = op.attrs["devices"]  # type: ignore[assignment]
                    where = self.mapped(inner, onto)
                    if (op.callee, id(where)) not in seen:
                        visit(self.module.function(op.callee), where)
                    continue
                entry = lookup(op.name, op.location)
                if Trait.COMMUNICATES not in entry.traits:
                    continue
                target = self.mapped(op.results[0].placed.devices, onto)
                if Trait.TRANSFER in entry.traits:
                    source = self.mapped(op.operands[0].placed.devices, onto)
                    facts.transfers[id(source), id(target)] = (source, target)
                else:
                    facts.collectives[str(op.attrs["axis"]), id(target)] = target

        visit(self.module.main, None)
        size = max([highest, *(max(devices) + 1 for devices in facts.sets.values() if devices)])
        return np.zeros(size, dtype=np.int64), facts

    def _refine(self, facts: _Facts) -> None:
        if self.profile.groups:
            kinds = np.array(self.profile.kinds(len(self.of)))
            self._split(np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1))
        if self.profile.kind == "cpu" and any(takes_room for _, takes_room in assembled_outputs(self.module)):
            # Rank 0 needs more memory than ranks that do the same.
            self._split(np.arange(len(self.of)) > 0)
        for devices in facts.sets.values():
            mark = np.zeros(len(self.of), dtype=np.int64)
            mark[list(devices)] = 1
            self._split(mark)
        for (_, size), devices in facts.sizes.items():
            mark = np.full(len(self.of), -1, dtype=np.int64)
            mark[list(devices)] = size.values
            self._split(mark)
        rows = [(self.groups(axis, devices), devices) for (axis, _), devices in facts.collectives.items()]
        for groups, _ in rows:
            self._split(self._spread(groups, self._lie(groups)))
        pairs = [(np.array(a), np.array(b)) for a, b in facts.transfers.values()]
        before = -1
        while before != (now := int(self.of.max()) + 1):
            before = now
            for groups, _ in rows:
                self._split(self._spread(groups, np.sort(self.of[groups], axis=1)))
            for a, b in pairs:
                far = self._lie(np.stack([a, b], axis=1))
                for one, other in ((a, b), (b, a)):
                    mark = np.full(len(self.of), -1, dtype=np.int64)
                    mark[one] = _numbered(np.column_stack([self.of[other], far]))
                    self._split(mark)

    def _split(self, mark: Array) -> None:
        """Tell apart devices of a class that are marked differently."""
        self.of = _numbered(np.column_stack([self.of, mark]))

    def _spread(self, groups: Array, rows: Array) -> Array:
        """A mark for each device: the number of its group's row."""
        mark = np.full(len(self.of), -1, dtype=np.int64)
        mark[groups] = _numbered(rows)[:, None]
        return mark

    def _lie(self, groups: Array) -> Array:
        """How each group lies in the topology: the number of units that it touches at each level."""
        columns = []
        for level in self.profile.levels:
            units = np.sort(groups // level.size, axis=1)
            columns.append(1 + (np.diff(units, axis=1) != 0).sum(axis=1))
        return np.column_stack(columns)


@dataclass
class _Facts:
    """What tells devices apart: the sets they belong to, their sizes, and whom they communicate with."""

    sets: dict[int, Devices] = field(default_factory=dict)
    sizes: dict[tuple[int, PerRank], Devices] = field(default_factory=dict)
    collectives: dict[tuple[str, int], Devices] = field(default_factory=dict)
    transfers: dict[tuple[int, int], tuple[Devices, Devices]] = field(default_factory=dict)


def mesh_with(module: Module, axis: str) -> DeviceMesh:
    """The mesh of a module that has an axis of this name. Raises `VerificationError` when none has."""
    for mesh in module.meshes:
        if axis in mesh.axes:
            return mesh
    raise VerificationError(f"no mesh of the program has an axis {axis!r}")


def groups_along(mesh: DeviceMesh, axis: str, devices: Devices) -> Array:
    """The groups of `devices` that differ along a mesh axis only, in order along it, one a row.

    Raises `VerificationError` when only some devices of a group are among them.
    """
    number = mesh.axes.index(axis)
    rows = np.moveaxis(np.arange(mesh.size).reshape(mesh.shape), number, -1).reshape(-1, mesh.shape[number])
    inside = np.zeros(mesh.size, dtype=bool)
    inside[list(devices)] = True
    chosen = inside[rows]
    if (chosen.any(axis=1) != chosen.all(axis=1)).any():
        raise VerificationError(f"a communication along {axis} has only some of the devices of a group: {devices}")
    found: Array = rows[chosen.all(axis=1)]
    return found


def _numbered(rows: Array) -> Array:
    """The same number for equal rows."""
    columns = rows.reshape(len(rows), -1)
    if columns.shape[1] > 4:
        found: Array = np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
        return found
    # Few columns: numbers of pairs, which sort much faster than rows do.
    found = columns[:, 0]
    for column in columns.T[1:]:
        low = int(column.min())
        found = np.unique(found * (int(column.max()) - low + 1) + (column - low), return_inverse=True)[1]
    return np.unique(found, return_inverse=True)[1]


def _types(function: Function) -> Iterator[PlacedType]:
    for item in function.inputs:
        yield item.value.placed
    for op in function.ops:
        for value in op.results:
            yield value.placed
