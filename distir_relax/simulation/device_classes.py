"""Device classes: devices that do the same throughout a program are simulated as one.

Two devices are in one class if they have the same speed and memory, and every op of the program treats them alike: the
same shapes, and communication with devices of the same classes over the same levels of links. This is the coarsest
equitable partition, computed by refinement: devices are first distinguished by their own features, then by the classes
of their communication peers, until nothing changes. So the cost of a simulation depends on the number of stages of a
program, not on the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distir_relax.cost.profile import Level, Profile
from distir_relax.interpret.mesh_groups import axis_groups, mesh_of_axis
from distir_relax.ir import Function, Module, PerRank, PlacedType
from distir_relax.ops import Trait, lookup
from distir_relax.simulation.memory_categories import assembled_outputs

Devices = tuple[int, ...]
Array = npt.NDArray[Any]


@dataclass
class DeviceClasses:
    """Device classes of a module: `of[d]` is the class of device `d`, `members[c]` are the devices of class c.

    `uplinks` has for each level with an uplink, by its number, the first class in the unit of each class.
    """

    module: Module
    profile: Profile
    of: Array = field(init=False)
    members: list[Array] = field(init=False)
    uplinks: dict[int, list[int]] = field(default_factory=dict)
    _map_cache: dict[tuple[int, int], Devices] = field(default_factory=dict)
    _interned: dict[Devices, Devices] = field(default_factory=dict)
    _alive: dict[int, Devices] = field(default_factory=dict)
    _groups: dict[tuple[str, int], Array] = field(default_factory=dict)
    _indices: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of, features = self._collect()
        self._refine(features)
        order = np.argsort(self.of, kind="stable")
        self.members = np.split(order, np.flatnonzero(np.diff(self.of[order])) + 1)
        firsts = [int(members[0]) for members in self.members]
        for level in shared_levels(self.profile):
            units = [slice(d // level.size * level.size, (d // level.size + 1) * level.size) for d in firsts]
            number = self.profile.levels.index(level)
            self.uplinks[number] = [int(self.of[unit].min()) for unit in units]

    @property
    def count(self) -> int:
        """The number of classes."""
        return len(self.members)

    def map_devices(self, local_devices: Devices, onto: Devices | None) -> Devices:
        """Map devices of a function to those of the program; equal sets are the same object."""
        key = (id(local_devices), id(onto))
        result = self._map_cache.get(key)
        if result is None:
            result = local_devices if onto is None else tuple(onto[i] for i in local_devices)
            result = self._map_cache[key] = self._interned.setdefault(result, result)
            for devices in (local_devices, onto or ()):
                self._alive[id(devices)] = devices
        return result

    def index(self, devices: Devices) -> dict[int, int]:
        """Return the position of each device in a device set."""
        result = self._indices.get(id(devices))
        if result is None:
            self._alive[id(devices)] = devices
            result = self._indices[id(devices)] = {device: i for i, device in enumerate(devices)}
        return result

    def groups(self, axis: str, devices: Devices) -> Array:
        """Return the groups of `devices` along a mesh axis, one per row. Raises `VerificationError` if incomplete."""
        key = (axis, id(devices))
        result = self._groups.get(key)
        if result is None:
            self._alive[id(devices)] = devices
            result = self._groups[key] = axis_groups(mesh_of_axis(self.module, axis), axis, devices)
        return result

    def _collect(self) -> tuple[Array, _Features]:
        features = _Features()
        self._visit(self.module.main, None, features, set())
        sizes = [mesh.size for mesh in self.module.meshes]
        size = max([1, *sizes, *(max(devices) + 1 for devices in features.sets.values() if devices)])
        return np.zeros(size, dtype=np.int64), features

    def _visit(self, function: Function, onto: Devices | None, features: _Features, seen: set[tuple[str, int]]) -> None:
        """Add the features of the ops of a function on devices, but of those `seen`, and of its callees."""
        seen.add((function.name, id(onto)))
        for type_ in {id(type_): type_ for type_ in _types(function)}.values():
            devices = self.map_devices(type_.devices, onto)
            features.sets[id(devices)] = devices
            for size in type_.shape:
                if isinstance(size, PerRank):
                    features.sizes[id(devices), size] = devices
        for op in function.ops:
            if op.callee:
                local_devices: Devices = op.attrs["devices"]  # type: ignore[assignment]
                callee_devices = self.map_devices(local_devices, onto)
                if (op.callee, id(callee_devices)) not in seen:
                    self._visit(self.module.function(op.callee), callee_devices, features, seen)
                continue
            entry = lookup(op.name, op.location)
            if Trait.COMMUNICATES not in entry.traits:
                continue
            target = self.map_devices(op.results[0].placed.devices, onto)
            if Trait.TRANSFER in entry.traits:
                source = self.map_devices(op.operands[0].placed.devices, onto)
                features.transfers[id(source), id(target)] = (source, target)
            else:
                features.collectives[str(op.attrs["axis"]), id(target)] = target

    def _refine(self, features: _Features) -> None:
        if self.profile.groups:
            kinds = np.array(self.profile.device_specs(len(self.of)))
            self._split(np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1))
        if self.profile.kind == "cpu" and any(takes_room for _, takes_room in assembled_outputs(self.module)):
            # Rank 0 needs more memory than otherwise equal ranks.
            self._split(np.arange(len(self.of)) > 0)
        for devices in features.sets.values():
            mark = np.zeros(len(self.of), dtype=np.int64)
            mark[list(devices)] = 1
            self._split(mark)
        for (_, size), devices in features.sizes.items():
            mark = np.full(len(self.of), -1, dtype=np.int64)
            mark[list(devices)] = size.values
            self._split(mark)
        rows = [(self.groups(axis, devices), devices) for (axis, _), devices in features.collectives.items()]
        for groups, _ in rows:
            self._split(self._mark_groups(groups, self._topology(groups)))
        pairs = [(np.array(a), np.array(b)) for a, b in features.transfers.values()]
        previous_count = -1
        while previous_count != (count := int(self.of.max()) + 1):
            previous_count = count
            for groups, _ in rows:
                self._split(self._mark_groups(groups, np.sort(self.of[groups], axis=1)))
            for a, b in pairs:
                distances = self._topology(np.stack([a, b], axis=1))
                for side, other in ((a, b), (b, a)):
                    mark = np.full(len(self.of), -1, dtype=np.int64)
                    mark[side] = _row_ids(np.column_stack([self.of[other], distances]))
                    self._split(mark)
            for level in shared_levels(self.profile):
                self._split(self._mark_units(level.size))

    def _split(self, mark: Array) -> None:
        """Split classes whose devices have different marks."""
        self.of = _row_ids(np.column_stack([self.of, mark]))

    def _mark_groups(self, groups: Array, rows: Array) -> Array:
        """Return a mark per device: the id of its group's row."""
        mark = np.full(len(self.of), -1, dtype=np.int64)
        mark[groups] = _row_ids(rows)[:, None]
        return mark

    def _mark_units(self, size: int) -> Array:
        """Return a mark per device: the id of the classes of its unit, whose devices share an uplink."""
        padded = np.full(-(-len(self.of) // size) * size, -1, dtype=np.int64)
        padded[: len(self.of)] = self.of
        marks: Array = _row_ids(np.sort(padded.reshape(-1, size), axis=1)).repeat(size)
        return marks[: len(self.of)]

    def _topology(self, groups: Array) -> Array:
        """Return the position of each group in the topology, on which the time of its communication depends.

        That is the members at which a unit of a level begins, and of each unit with an uplink the parts of all groups
        that are in it.
        """
        columns = []
        for level in self.profile.levels:
            units = groups // level.size
            begins = np.packbits(np.diff(units, axis=1, prepend=-1) != 0, axis=1)
            columns.append(begins.astype(np.int64))
        columns += [_unit_parts(groups, level.size) for level in shared_levels(self.profile)]
        return np.column_stack(columns)


@dataclass
class _Features:
    """Features that distinguish devices: the sets they belong to, their sizes, and their communication peers."""

    sets: dict[int, Devices] = field(default_factory=dict)
    sizes: dict[tuple[int, PerRank], Devices] = field(default_factory=dict)
    collectives: dict[tuple[str, int], Devices] = field(default_factory=dict)
    transfers: dict[tuple[int, int], tuple[Devices, Devices]] = field(default_factory=dict)


def shared_levels(profile: Profile) -> list[Level]:
    """Return the levels of a machine whose units have an uplink that their devices share."""
    return [level for level in profile.levels[:-1] if level.uplink]


def _unit_parts(groups: Array, size: int) -> Array:
    """Return an id for each group: of the parts of groups that are in the units of its members, by first and number."""
    units, n = groups // size, groups.shape[1]
    keys = np.arange(len(groups))[:, None] * (int(units.max()) + 1) + units
    _, first, index, members = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    part = _row_ids(np.column_stack([first % n, members]))
    unit = units.reshape(-1)[first]
    order = np.lexsort([part, unit])
    starts = np.flatnonzero(np.diff(unit[order], prepend=-1))
    parts = np.full((len(starts), int(np.diff(starts, append=len(order)).max())), -1, dtype=np.int64)
    number = np.cumsum(np.isin(np.arange(len(order)), starts)) - 1
    parts[number, np.arange(len(order)) - starts[number]] = part[order]
    unit_ids = np.empty(len(order), dtype=np.int64)
    unit_ids[order] = _row_ids(parts)[number]
    ids: Array = _row_ids(unit_ids[index.reshape(groups.shape)])
    return ids


def _row_ids(rows: Array) -> Array:
    """Return an id per row; equal rows have equal ids."""
    columns = rows.reshape(len(rows), -1)
    if columns.shape[1] > 4:
        ids: Array = np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
        return ids
    # Few columns: ids of pairs, which sort much faster than rows.
    ids = columns[:, 0]
    for column in columns.T[1:]:
        low = int(column.min())
        ids = np.unique(ids * (int(column.max()) - low + 1) + (column - low), return_inverse=True)[1]
    return np.unique(ids, return_inverse=True)[1]


def _types(function: Function) -> Iterator[PlacedType]:
    for item in function.inputs:
        yield item.value.placed
    for op in function.ops:
        for value in op.results:
            yield value.placed
