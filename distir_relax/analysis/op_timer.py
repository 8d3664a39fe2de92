"""What each op does to the devices of its classes: how long it keeps them, with whom, and what memory it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distir_relax.analysis.copies import NO_COPIES, Copies
from distir_relax.analysis.device_classes import DeviceClasses, Devices
from distir_relax.cost.network import seconds_of
from distir_relax.cost.profile import Profile
from distir_relax.cost.roofline import op_seconds
from distir_relax.ir import Op, PlacedType, TensorType, Value
from distir_relax.ops import OpDef, Trait, lookup
from distir_relax.ops.table.type_checks import local_attrs

FEMTOSECONDS = 1e15
"""Time is counted in whole femtoseconds, so that equal states are recognised."""

COMPUTE, COMMUNICATION = 0, 1

# Ops that keep no device busy.
_IDLE = frozenset({Trait.VIEW, Trait.SCALAR})

Bytes = tuple[tuple[int, int], ...]
"""Bytes by class."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens: it starts when all clocks of `waits` are there, and moves those of `sets`.

    Of one on a stream, each of its classes loses `held` of its own time.
    """

    classes: tuple[int, ...]
    waits: tuple[int, ...]
    sets: tuple[int, ...]
    duration: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does. `makes` has the bytes of each result, None where it lies in the storage of operand 0.

    `joins` are the classes that wait until what is made on a stream is there. `stream` is 0 for the devices' own
    order of ops. `devices` is how many devices the op keeps busy; `workspace` names each of its classes.
    """

    steps: tuple[Step, ...]
    makes: tuple[Bytes | None, ...]
    workspace: Bytes
    kind: int
    stream: int
    devices: int
    joins: tuple[int, ...] = ()


@dataclass
class Planner:
    """Finds the work of ops; times are computed once for each distinct local op."""

    profile: Profile
    classes: DeviceClasses
    streams: Mapping[str, int]
    """The number of each stream, from 1 on. The clock of class c on stream s is c + s * (number of classes)."""
    fixed: bool = False
    """Whether the program leaves its weights as they are."""
    cold: frozenset[int] = frozenset()
    """The classes whose weights are too many for a cache."""
    _bytes: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    _parted: dict[tuple[Bytes, int], tuple[Bytes, Bytes]] = field(default_factory=dict)
    _present: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _times: dict[object, int] = field(default_factory=dict)
    _firsts: dict[tuple[str, int], list[Devices]] = field(default_factory=dict)
    _speeds: list[float] = field(init=False)
    """By class."""
    _works: dict[object, Work] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._speeds = [self.profile.speed_of(int(members[0])) for members in self.classes.members]

    def present(self, devices: Devices) -> tuple[int, ...]:
        """The classes of a device set."""
        found = self._present.get(id(devices))
        if found is None:
            self.classes.index(devices)
            found = self._present[id(devices)] = tuple(sorted(set(self.classes.of[list(devices)].tolist())))
        return found

    def bytes_of(self, value: Value, onto: Devices | None) -> Bytes:
        """What a value takes on each class that has it. `onto` are the devices of the function's call."""
        kind = value.placed
        key = (id(kind), id(onto))
        found = self._bytes.get(key)
        if found is None:
            devices = self.classes.mapped(kind.devices, onto)
            found = tuple((c, kind.local(i).bytes) for c, i in self._representatives(devices))
            self._bytes[key] = found
        return found

    def parted(self, held: Bytes, devices: Devices) -> tuple[Bytes, Bytes]:
        """What is held on the classes of a device set, and what on others."""
        key = (held, id(devices))
        found = self._parted.get(key)
        if found is None:
            present = set(self.present(devices))
            inside = tuple((c, n) for c, n in held if c in present)
            found = self._parted[key] = inside, tuple((c, n) for c, n in held if c not in present)
        return found

    def plan(
        self,
        op: Op,
        onto: Devices | None,
        made_on: Mapping[str, int],
        lasting: Sequence[bool] = (),
        copies: Copies = NO_COPIES,
    ) -> Work:
        """The work of an op of a function that runs on `onto`, of the entry function if that is None.

        `made_on` has the stream of the function's values that are made on one. `lasting` says which operands, and then
        results, are weights, their gradients, or an optimizer's state. `copies` are those of the function.
        """
        # Ops of equal types are alike, whatever task what they send is of.
        attrs = tuple([item for item in op.attrs.items() if item[0] != "task"])
        kinds = tuple([id(v.type) for v in (*op.operands, *op.results)])
        joins = bool(op.operands) and op.operands[0].name in made_on
        first = op.results[0].name if op.results else ""
        is_copy, copied = first in copies.views, copies.operands.get(first, ())
        key = (op.name, attrs, kinds, id(onto), joins, lasting, is_copy, copied)
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self._plan(op, onto, joins, lasting, is_copy, copied)
        return found

    def _plan(
        self,
        op: Op,
        onto: Devices | None,
        is_on_stream: bool,
        lasting: Sequence[bool],
        is_copy: bool,
        copied: Sequence[int],
    ) -> Work:
        entry = lookup(op.name, op.location)
        results = [v.placed for v in op.results]
        devices = self.classes.mapped(results[0].devices, onto)
        shares = entry.shares_storage and not is_copy
        makes = tuple(None if shares else self.bytes_of(v, onto) for v in op.results)
        if Trait.WAIT in entry.traits:
            joins = self.present(devices) if is_on_stream else ()
            return Work((), makes, (), COMMUNICATION, 0, 0, joins)
        stream = self.streams[str(op.attrs["stream"])] if "stream" in op.attrs else 0
        if Trait.COMMUNICATES in entry.traits:
            steps = self._communication(op, entry, devices, onto, stream)
            kind = COMMUNICATION
        else:
            steps = self._computation(op, entry, devices, onto, stream, lasting)
            kind = COMPUTE
        count = len(devices) if entry.traits.isdisjoint(_IDLE) else 0
        if Trait.TRANSFER in entry.traits:
            count *= 2
        return Work(steps, makes, self._workspace(op, entry, devices, copied), kind, stream, count)

    def _computation(
        self, op: Op, entry: OpDef, devices: Devices, onto: Devices | None, stream: int, lasting: Sequence[bool]
    ) -> tuple[Step, ...]:
        steps = []
        for c, i in self._representatives(devices):
            found = self._operands(op, devices[i], onto)
            operands = [kind for kind, _ in found]
            attrs = local_attrs(op.attrs, i)
            results = [v.placed.local(i) for v in op.results]
            fixed, cold = self.fixed and any(lasting), tuple(lasting) if c in self.cold else ()
            if cold and len(found) < len(op.operands):
                cold = (*(lasting[number] for _, number in found), *lasting[len(op.operands) :])
            speed = self._speeds[c]
            key = (op.name, tuple(operands), tuple(map(str, attrs.items())), tuple(results), fixed, cold, speed)
            if key not in self._times:
                seconds = op_seconds(self.profile, entry, operands, attrs, results, fixed, cold, speed)
                self._times[key] = femtoseconds(seconds)
            steps.append(self._step((c,), stream, self._times[key]))
        return tuple(step for step in steps if step.duration)

    def _operands(self, op: Op, device: int, onto: Devices | None) -> list[tuple[TensorType, int]]:
        """The operands that a device has, each with its number."""
        found = []
        for number, value in enumerate(op.operands):
            kind = value.placed
            place = self.classes.index(self.classes.mapped(kind.devices, onto)).get(device)
            if place is not None:
                found.append((kind.local(place), number))
        return found

    def _communication(
        self, op: Op, entry: OpDef, devices: Devices, onto: Devices | None, stream: int
    ) -> tuple[Step, ...]:
        """Each set of classes that communicate with each other, once."""
        collective = entry.cost.collective
        steps: dict[tuple[int, ...], Step] = {}
        groups: list[tuple[Devices, tuple[int, ...]]]
        operand = (op.results if entry.cost.brings_as_gets else op.operands)[0].placed
        source = self.classes.mapped(operand.devices, onto)
        index = self.classes.index(source)
        if Trait.TRANSFER in entry.traits:
            groups = [
                ((source[i], devices[i]), (operand.local(i).bytes,))
                for _, i in (*self._representatives(source), *self._representatives(devices))
            ]
        else:
            groups = [
                (members, _held(operand, members, index)) for members in self._groups(str(op.attrs["axis"]), devices)
            ]
        for members, held in groups:
            present = self.present(members)
            if present not in steps:
                self.classes.index(members)
                key = (collective, id(members), held if len(set(held)) > 1 else held[0])
                if key not in self._times:
                    self._times[key] = femtoseconds(seconds_of(self.profile, collective, members, held))
                sender = self.present(members[:1]) if Trait.TRANSFER in entry.traits else present
                steps[present] = self._step(present, stream, self._times[key], sender)
        return tuple(steps.values())

    def _groups(self, axis: str, devices: Devices) -> list[Devices]:
        """For each class of a device set, the group along a mesh axis that its first device is in."""
        key = (axis, id(devices))
        found = self._firsts.get(key)
        if found is None:
            rows = self.classes.groups(axis, devices)
            firsts = [self.classes.members[c][0] for c in self.present(devices)]
            chosen = rows[np.isin(rows, firsts).any(axis=1)]
            found = self._firsts[key] = [tuple(row) for row in chosen.tolist()]
        return found

    def _step(
        self, classes: tuple[int, ...], stream: int, duration: int, starting: tuple[int, ...] | None = None
    ) -> Step:
        """What keeps `classes` busy; on a stream, it begins as soon as those that are `starting` it come to it."""
        if not stream:
            return Step(classes, classes, classes, duration)
        clocks = tuple(c + stream * self.classes.count for c in classes)
        held = 0 if starting is None else round(duration * (1.0 - self.profile.beside))
        return Step(classes, (*(starting or classes), *clocks), clocks, duration, held)

    def _workspace(self, op: Op, entry: OpDef, devices: Devices, copied: Sequence[int]) -> Bytes:
        facets = [entry.cost.workspace, entry.cost.cpu_workspace if self.profile.kind == "cpu" else None]
        needs = [facet for facet in facets if facet is not None]
        found = []
        for c, i in self._representatives(devices):
            extra = 0
            if needs or copied:
                attrs = local_attrs(op.attrs, i)
                # The operand of a send is on other devices than its result.
                operands = [v.placed.local(min(i, len(v.placed.devices) - 1)) for v in op.operands]
                results = [v.placed.local(i) for v in op.results]
                extra = sum(int(facet(operands, attrs, results)) for facet in needs)
                extra += sum(operands[number].bytes for number in copied)
            found.append((c, extra))
        return tuple(found)

    def _representatives(self, devices: Devices) -> list[tuple[int, int]]:
        """For each class of a device set, all of which is in it, the place there of one of its devices."""
        index = self.classes.index(devices)
        return [(c, index[int(self.classes.members[c][0])]) for c in self.present(devices)]


def femtoseconds(seconds: float) -> int:
    """A time as a whole number."""
    return round(seconds * FEMTOSECONDS)


def _held(kind: PlacedType, members: Devices, index: Mapping[int, int]) -> tuple[int, ...]:
    """The bytes that devices hold of a type, whose device set has them at the places that `index` says."""
    if all(isinstance(size, int) for size in kind.shape):
        return (kind.local(0).bytes,) * len(members)
    return tuple(kind.local(index[d]).bytes for d in members)
