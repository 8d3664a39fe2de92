"""Op timing: duration, participating device classes, and memory of each op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distir_relax.cost.network import CollectiveTiming, collective_timing, level_of
from distir_relax.cost.profile import SHAPE_OP, Profile
from distir_relax.cost.roofline import host_seconds, op_work, work_seconds
from distir_relax.ir import PACKED, Op, PlacedType, TensorType, Value
from distir_relax.ops import OpDef, Trait, lookup
from distir_relax.ops.table.entry import typical_costs
from distir_relax.ops.table.spmd_inference import local_attrs
from distir_relax.simulation.copies import NO_COPIES, Copies
from distir_relax.simulation.device_classes import Array, DeviceClasses, Devices
from distir_relax.simulation.shared_links import LinkUse

FEMTOSECONDS = 1e15
"""Times are integers in femtoseconds, so that equal states compare equal."""

COMPUTE, COMMUNICATION = 0, 1

# Ops that take no device time.
_IDLE = frozenset({Trait.VIEW, Trait.SCALAR})

Bytes = tuple[tuple[int, int], ...]
"""Bytes by device class."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """An interval on clocks: it starts when the clocks in `waits` and `hosts` are reached, and advances those in
    `sets`. `hosts` are clocks of hosts.

    If it is on a stream, each of its classes also loses `blocked` of its own time. `links` are the uplinks that it
    uses, which may be shared with other communications.
    """

    classes: tuple[int, ...]
    waits: tuple[int, ...]
    sets: tuple[int, ...]
    duration: int
    blocked: int = 0
    hosts: tuple[int, ...] = ()
    links: tuple[LinkUse, ...] = ()

    def repeated(self, count: int) -> TimedStep:
        """Return `count` equal steps in turn as one."""
        links = tuple([use.repeated(count) for use in self.links])
        return replace(self, duration=count * self.duration, blocked=count * self.blocked, links=links)


@dataclass(frozen=True, slots=True)
class OpEffect:
    """The effect of an op. `allocates` has the bytes of each result, None if it is in the storage of operand `source`.

    `issues` are clocks of hosts, with the time that they need to issue the op; before, those of `synchronizes` wait for
    the clocks of their devices. `joined_classes` wait for the value computed on a stream. `stream` is 0 for the
    devices' own order of ops. `devices` is the number of devices that are busy; `workspace` lists all classes of the
    op.
    """

    steps: tuple[TimedStep, ...]
    allocates: tuple[Bytes | None, ...]
    workspace: Bytes
    kind: int
    stream: int
    devices: int
    issues: tuple[tuple[int, int], ...] = ()
    synchronizes: tuple[tuple[int, int], ...] = ()
    """Clocks of hosts and of their devices."""
    joined_classes: tuple[int, ...] = ()
    source: int = 0
    takes_memory: bool = field(init=False)
    """Whether it allocates storage, or needs workspace."""

    def __post_init__(self) -> None:
        takes_memory = any(self.allocates) or any(size for _, size in self.workspace)
        object.__setattr__(self, "takes_memory", takes_memory)

    def repeated(self, count: int) -> OpEffect:
        """Return the effect of `count` equal ops in turn, with the results of one."""
        steps = tuple([step.repeated(count) for step in self.steps])
        issues = tuple((clock, count * duration) for clock, duration in self.issues)
        return replace(self, steps=steps, devices=count * self.devices, issues=issues)


@dataclass
class OpTimer:
    """Computes effects of ops; times are cached by distinct local op."""

    profile: Profile
    classes: DeviceClasses
    streams: Mapping[str, int]
    """The number of each stream, from 1 on. The clock of class c on stream s is c + s * (number of classes).

    Clocks of hosts, if they have their own, come after those of the last stream.
    """
    uncached: Mapping[int, float] = field(default_factory=dict)
    """For classes whose weights exceed the cache, the share of them that is outside of it."""
    _bytes: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    _splits: dict[tuple[Bytes, int], tuple[Bytes, Bytes]] = field(default_factory=dict)
    _present_classes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _times: dict[object, CollectiveTiming] = field(default_factory=dict)
    _work_times: dict[object, tuple[int, int]] = field(default_factory=dict)
    """The time of an op on its device, and on its host."""
    _firsts: dict[tuple[str, int], list[Devices]] = field(default_factory=dict)
    _links: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    _speeds: list[float] = field(init=False)
    """Speed by class."""
    _effects: dict[object, OpEffect] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._speeds = [self.profile.speed_of(int(members[0])) for members in self.classes.members]

    def classes_of(self, devices: Devices) -> tuple[int, ...]:
        """Return the classes of a device set."""
        result = self._present_classes.get(id(devices))
        if result is None:
            self.classes.index(devices)
            result = self._present_classes[id(devices)] = tuple(sorted(set(self.classes.of[list(devices)].tolist())))
        return result

    def bytes_of(self, value: Value, onto: Devices | None) -> Bytes:
        """Return the bytes of a value on each class that has it. `onto` are the devices of the function's call."""
        type_ = value.placed
        key = (id(type_), id(onto))
        result = self._bytes.get(key)
        if result is None:
            devices = self.classes.map_devices(type_.devices, onto)
            result = tuple((c, type_.local(i).bytes) for c, i in self._representatives(devices))
            self._bytes[key] = result
        return result

    def split_on(self, total: Bytes, devices: Devices) -> tuple[Bytes, Bytes]:
        """Split bytes by class into those on the classes of a device set, and others."""
        key = (total, id(devices))
        result = self._splits.get(key)
        if result is None:
            present = set(self.classes_of(devices))
            inside = tuple((c, n) for c, n in total if c in present)
            result = self._splits[key] = inside, tuple((c, n) for c, n in total if c not in present)
        return result

    def effect(
        self,
        op: Op,
        onto: Devices | None,
        stream_of: Mapping[str, int],
        resident: Sequence[bool] = (),
        copies: Copies = NO_COPIES,
        reused: int | None = None,
    ) -> OpEffect:
        """Return the effect of an op in a function that runs on `onto`, None for the entry function.

        `stream_of` has the streams of values computed on one. `resident` tells which operands, and then results, are
        weights, their gradients, or an optimizer's state. `copies` are those of the function. The result is written to
        the storage of operand `reused`, if that is not None.
        """
        # Ops of equal types have equal effects, whatever task a sent value belongs to.
        attrs = tuple([item for item in op.attrs.items() if item[0] != "task"])
        type_ids = tuple([id(v.type) for v in (*op.operands, *op.results)])
        is_on_stream = bool(op.operands) and op.operands[0].name in stream_of
        first_result = op.results[0].name if op.results else ""
        is_copy, copied_operands = first_result in copies.views, copies.operands.get(first_result, ())
        key = (op.name, attrs, type_ids, id(onto), is_on_stream, resident, is_copy, copied_operands, reused)
        effect = self._effects.get(key)
        if effect is None:
            effect = self._effects[key] = self._effect(
                op, onto, is_on_stream, resident, is_copy, copied_operands, reused
            )
        return effect

    def _effect(
        self,
        op: Op,
        onto: Devices | None,
        is_on_stream: bool,
        resident: Sequence[bool],
        is_copy: bool,
        copied: Sequence[int],
        reused: int | None,
    ) -> OpEffect:
        entry = lookup(op.name, op.location)
        results = [v.placed for v in op.results]
        devices = self.classes.map_devices(results[0].devices, onto)
        shares_storage = (entry.shares_storage and not is_copy) or reused is not None
        allocates = tuple(None if shares_storage else self.bytes_of(v, onto) for v in op.results)
        if Trait.WAIT in entry.traits:
            joined_classes = self.classes_of(devices) if is_on_stream else ()
            return OpEffect((), allocates, (), COMMUNICATION, 0, 0, joined_classes=joined_classes)
        stream = self._stream(op, entry, devices)
        issues: tuple[tuple[int, int], ...] = ()
        synchronizes: tuple[tuple[int, int], ...] = ()
        if Trait.COMMUNICATES in entry.traits:
            steps = self._communication(op, entry, devices, onto, stream)
            kind = COMMUNICATION
            if self.profile.is_asynchronous:
                dispatch = femtoseconds(self.profile.dispatch)
                issues = tuple((self._host(c), dispatch) for c in sorted({c for step in steps for c in step.classes}))
        else:
            steps, issues = self._computation(op, entry, devices, onto, stream, resident)
            kind = COMPUTE
            if issues and entry.cost.shape_ops and SHAPE_OP in self.profile.waits:
                synchronizes = tuple((clock, clock % self.classes.count) for clock, _ in issues)
        count = len(devices) if entry.traits.isdisjoint(_IDLE) else 0
        if Trait.TRANSFER in entry.traits:
            count *= 2
        workspace = self._workspace(op, entry, devices, copied)
        return OpEffect(steps, allocates, workspace, kind, stream, count, issues, synchronizes, source=reused or 0)

    def _stream(self, op: Op, entry: OpDef, devices: Devices) -> int:
        """Return the number of the stream on which an op runs, 0 for one that its devices run in order."""
        if "stream" not in op.attrs:
            return 0
        stream = self.streams[str(op.attrs["stream"])]
        if Trait.TRANSFER in entry.traits or Trait.COMMUNICATES not in entry.traits:
            return stream
        groups = self._groups(str(op.attrs["axis"]), devices)
        return stream if all(level_of(self.profile, group).overlaps for group in groups) else 0

    def _computation(
        self, op: Op, entry: OpDef, devices: Devices, onto: Devices | None, stream: int, resident: Sequence[bool]
    ) -> tuple[tuple[TimedStep, ...], tuple[tuple[int, int], ...]]:
        """Return the steps of an op that does not communicate, and the time that the hosts need to issue it."""
        steps, issues = [], []
        for c, i in self._representatives(devices):
            local_operands = self._operands(op, devices[i], onto)
            operands = [type_ for type_, _ in local_operands]
            attrs = local_attrs(op.attrs, i)
            results = [v.placed.local(i) for v in op.results]
            share = self.uncached.get(c, 0.0)
            uncached = tuple(resident) if share else ()
            if uncached and len(local_operands) < len(op.operands):
                uncached = (*(resident[number] for _, number in local_operands), *resident[len(op.operands) :])
            speed = self._speeds[c]
            local = (tuple(operands), tuple(map(str, attrs.items())), tuple(results))
            key = (op.name, *local, uncached, share, speed)
            times = self._work_times.get(key)
            if times is None:
                packed = any(kind.form == PACKED for kind in operands)
                work = op_work(entry, operands, attrs, results, packed, uncached, share, self.profile.is_recorded)
                on_device = femtoseconds(work_seconds(self.profile, work, speed))
                on_host = femtoseconds(host_seconds(self.profile, work)) if self.profile.is_asynchronous else 0
                times = self._work_times[key] = on_device, on_host
            steps.append(self._step((c,), stream, times[0]))
            issues.append((self._host(c), times[1]))
        return tuple(step for step in steps if step.duration), tuple(issue for issue in issues if issue[1])

    def _operands(self, op: Op, device: int, onto: Devices | None) -> list[tuple[TensorType, int]]:
        """Return the operands on a device, with their numbers."""
        local_operands = []
        for number, value in enumerate(op.operands):
            type_ = value.placed
            index = self.classes.index(self.classes.map_devices(type_.devices, onto)).get(device)
            if index is not None:
                local_operands.append((type_.local(index), number))
        return local_operands

    def _communication(
        self, op: Op, entry: OpDef, devices: Devices, onto: Devices | None, stream: int
    ) -> tuple[TimedStep, ...]:
        """Return one step for each distinct set of classes that communicate."""
        collective = entry.cost.collective
        steps: dict[tuple[int, ...], TimedStep] = {}
        groups: list[tuple[Devices, tuple[int, ...]]]
        operand = (op.results if entry.cost.brings_as_gets else op.operands)[0].placed
        source = self.classes.map_devices(operand.devices, onto)
        index = self.classes.index(source)
        concurrent: Array | None = None
        if Trait.TRANSFER in entry.traits:
            groups = [
                ((source[i], devices[i]), (operand.local(i).bytes,))
                for _, i in (*self._representatives(source), *self._representatives(devices))
            ]
            if self.classes.uplinks:
                concurrent = np.column_stack([source, devices])
        else:
            axis = str(op.attrs["axis"])
            groups = [(members, _sizes(operand, members, index)) for members in self._groups(axis, devices)]
            if self.classes.uplinks:
                concurrent = self.classes.groups(axis, devices)
        for members, shard_bytes in groups:
            classes = self.classes_of(members)
            if classes not in steps:
                self.classes.index(members)
                key = (collective, id(members), shard_bytes if len(set(shard_bytes)) > 1 else shard_bytes[0])
                if key not in self._times:
                    self._times[key] = collective_timing(self.profile, collective, members, shard_bytes, concurrent)
                timing = self._times[key]
                sender = self.classes_of(members[:1]) if Trait.TRANSFER in entry.traits else classes
                receiver = self.classes_of(members[1:]) if Trait.TRANSFER in entry.traits else classes
                blocks = collective is not None and str(collective) in self.profile.waits
                step = self._step(classes, stream, femtoseconds(timing.seconds), sender, blocks)
                links = self._link_uses(timing, sender, receiver) if timing.uplinks else ()
                steps[classes] = replace(step, links=links) if links else step
        return tuple(steps.values())

    def _link_uses(
        self, timing: CollectiveTiming, senders: Sequence[int], receivers: Sequence[int]
    ) -> tuple[LinkUse, ...]:
        """Return the uses of the uplinks that `senders` leave their units by, and `receivers` enter theirs by."""
        result = []
        for level, occupied, crossing in timing.uplinks:
            first_classes = self.classes.uplinks[level]
            for direction, ends in enumerate((senders, receivers)):
                for first in sorted({first_classes[c] for c in ends}):
                    link = link_id(level, first, direction, self.classes.count)
                    result.append(LinkUse(link, femtoseconds(occupied), femtoseconds(crossing)))
        return tuple(result)

    def links_of(self, devices: Devices) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the uplinks of the units of a device set, and for each class and level the first one's position."""
        result = self._links.get(id(devices))
        if result is None:
            positions: dict[int, int] = {}
            pattern = []
            for level, first_classes in self.classes.uplinks.items():
                for c in self.classes_of(devices):
                    for direction in (0, 1):
                        link = link_id(level, first_classes[c], direction, self.classes.count)
                        pattern.append(positions.setdefault(link, len(positions)))
            result = self._links[id(devices)] = tuple(positions), tuple(pattern)
        return result

    def _groups(self, axis: str, devices: Devices) -> list[Devices]:
        """Return for each class of a device set the group of its first device along a mesh axis."""
        key = (axis, id(devices))
        groups = self._firsts.get(key)
        if groups is None:
            rows = self.classes.groups(axis, devices)
            firsts = [self.classes.members[c][0] for c in self.classes_of(devices)]
            selected = rows[np.isin(rows, firsts).any(axis=1)]
            groups = self._firsts[key] = [tuple(row) for row in selected.tolist()]
        return groups

    def _step(
        self,
        classes: tuple[int, ...],
        stream: int,
        duration: int,
        starting_classes: tuple[int, ...] | None = None,
        blocks_host: bool = False,
    ) -> TimedStep:
        """Return a step of `classes`; on a stream, it starts as soon as the `starting_classes` reach the op.

        If it `blocks_host`, the hosts go on when it has ended.
        """
        hosts = tuple(map(self._host, classes)) if self.profile.is_asynchronous else ()
        blocked_hosts = hosts if blocks_host else ()
        if not stream:
            return TimedStep(classes, classes, (*classes, *blocked_hosts), duration, 0, hosts)
        clocks = tuple(c + stream * self.classes.count for c in classes)
        waits = (*(starting_classes or classes), *clocks)
        blocked = 0 if starting_classes is None else round(duration * (1.0 - self.profile.beside))
        return TimedStep(classes, waits, (*clocks, *blocked_hosts), duration, blocked, hosts)

    def _host(self, c: int) -> int:
        """Return the clock of the host of a class."""
        return c + (len(self.streams) + 1) * self.classes.count

    def _workspace(self, op: Op, entry: OpDef, devices: Devices, copied: Sequence[int]) -> Bytes:
        workspace = entry.cost.workspace
        if self.profile.kind == "cpu" and entry.cost.cpu_workspace:
            workspace = entry.cost.cpu_workspace
        result = []
        for c, i in self._representatives(devices):
            size = 0
            if workspace or copied:
                attrs = local_attrs(op.attrs, i)
                # The operand of a send is on other devices than the result.
                operands = [v.placed.local(min(i, len(v.placed.devices) - 1)) for v in op.operands]
                results = [v.placed.local(i) for v in op.results]
                size = int(workspace(*typical_costs(operands, attrs, results))) if workspace else 0
                size += sum(operands[number].bytes for number in copied)
            result.append((c, size))
        return tuple(result)

    def _representatives(self, devices: Devices) -> list[tuple[int, int]]:
        """Return for each class of a device set the position of its first device; classes are never split."""
        index = self.classes.index(devices)
        return [(c, index[int(self.classes.members[c][0])]) for c in self.classes_of(devices)]


def link_id(level: int, first: int, direction: int, count: int) -> int:
    """Return the number of the uplink of a unit with this `first` class of `count`: direction 0 is out, 1 in."""
    return (level * count + first) * 2 + direction


def femtoseconds(seconds: float) -> int:
    """Convert seconds to integer femtoseconds."""
    return round(seconds * FEMTOSECONDS)


def _sizes(type_: PlacedType, members: Devices, index: Mapping[int, int]) -> tuple[int, ...]:
    """Return the bytes of a type on each of `members`; `index` has their positions in its device set."""
    if all(isinstance(size, int) for size in type_.shape):
        return (type_.local(0).bytes,) * len(members)
    return tuple(type_.local(index[d]).bytes for d in members)
