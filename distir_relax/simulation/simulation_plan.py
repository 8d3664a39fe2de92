"""Simulation plan: the size-independent part of a simulation, shared by programs that differ only in sizes.

A search simulates a strategy at many batch sizes. These programs have the same ops on the same values, with different
types; so the order of ops, last uses, device classes, and weight gradients are computed once. Device classes depend on
per-device sizes, so sizes that differ between devices must be the same in all programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from distir_relax.cost.profile import Profile
from distir_relax.interpret.interpreter import SlotProgram, allocate_slots
from distir_relax.ir import Function, Module, Op, verify_no_recursion
from distir_relax.ops import Trait, lookup
from distir_relax.simulation.device_classes import DeviceClasses, Devices
from distir_relax.simulation.kept_values import as_executed
from distir_relax.simulation.memory_categories import ROLE_CATEGORY, WeightGradients
from distir_relax.simulation.microbatch_expansion import ExpandedEntry, expand_entry
from distir_relax.simulation.steady_state import Cycle, find_cycle


class EntryCall(NamedTuple):
    """A call of the entry function, with its operands split into entry inputs and computed values.

    `computed` are slots of computed operands, `inputs` slots of inputs of the entry. `key` is equal for calls of one
    function whose entry inputs have the same categories, which are the last to use the same operands, and whose same
    results are gradients (`outputs`); it is -1 if an input occurs twice.
    """

    key: int
    inputs: frozenset[int]
    computed: list[int]
    outputs: tuple[bool, ...]


@dataclass
class SimulationPlan:
    """Size-independent facts of a distributed program, except for sizes that differ between devices.

    Raises `VerificationError` if emitted microbatches differ in more than sizes, or a function is recursive.
    """

    module: Module
    profile: Profile
    classes: DeviceClasses = field(init=False)
    entry: ExpandedEntry = field(init=False)
    program: SlotProgram = field(init=False)
    programs: dict[str, SlotProgram] = field(default_factory=dict)
    """Slot programs of functions that are called, by name."""
    streams: dict[str, int] = field(init=False)
    """The number of each stream, from 1 on."""
    in_place: bool = field(init=False)
    """Whether some op updates its operand in place."""
    gradients: WeightGradients = field(init=False)
    cycle: Cycle | None = field(init=False)
    """Steps of the entry that recur, if there are some."""
    _entry_calls: _EntryCalls = field(init=False)
    _streams_of: dict[str, dict[str, int]] = field(default_factory=dict)
    _streams_in: dict[str, bool] = field(default_factory=dict)
    _topology_keys: dict[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module = self.module = as_executed(self.module, self.profile)
        self.classes = DeviceClasses(module, self.profile)
        verify_no_recursion(module)
        names = {str(op.attrs["stream"]) for f in module.functions for op in f.ops if "stream" in op.attrs}
        self.streams = {name: i + 1 for i, name in enumerate(sorted(names))}
        self.in_place = any(lookup(op.name, op.location).updates for f in module.functions for op in f.ops)
        self.gradients = WeightGradients(module)
        self._expand()

    def _expand(self) -> None:
        self.entry = expand_entry(self.module)
        self.program = allocate_slots(self.entry.steps)
        _hold_sent_values(self.entry.steps.ops, self.program)
        self._entry_calls = _EntryCalls(self.module, self.gradients, self.entry, self.program)
        self.cycle = find_cycle(self.program, self.entry.inputs)

    def with_records(self, module: Module) -> SimulationPlan:
        """Return the plan of a program with other records: of how many microbatches there are, and their order."""
        result = copy(self)
        result.module = as_executed(module, self.profile)
        result._expand()
        return result

    def call(self, number: int) -> EntryCall:
        """Return the call of a step of the entry function."""
        return self._entry_calls.of(number)

    def streams_of(self, function: Function) -> dict[str, int]:
        """Return the streams of a function's values that are computed on one."""
        result = self._streams_of.get(function.name)
        if result is None:
            ops = [op for op in function.ops if "stream" in op.attrs]
            result = {v.name: self.streams[str(op.attrs["stream"])] for op in ops for v in op.results}
            self._streams_of[function.name] = result
        return result

    def uses_streams(self, function: Function) -> bool:
        """Whether a function or its callees use a stream."""
        result = self._streams_in.get(function.name)
        if result is None:
            callees = (self.module.function(op.callee) for op in function.ops if op.callee)
            result = any("stream" in op.attrs for op in function.ops) or any(map(self.uses_streams, callees))
            self._streams_in[function.name] = result
        return result

    def topology_key(self, devices: Devices, present: Sequence[int]) -> object:
        """Return a key that is equal for device sets on which functions behave equally: same position in topology and
        mesh groups, same classes. `present` are their classes."""
        result = self._topology_keys.get(id(devices))
        if result is None:
            result = self._topology_keys[id(devices)] = self._topology_key(devices, present)
        return result

    def _topology_key(self, devices: Devices, present: Sequence[int]) -> object:
        device_ids = np.array(devices, dtype=np.int64)
        columns = [self.classes.of[device_ids]]
        columns += [device_ids // level.size for level in self.profile.levels]
        for mesh in self.module.meshes:
            numbers = np.arange(mesh.size).reshape(mesh.shape)
            in_mesh = device_ids < mesh.size
            for axis, count in enumerate(mesh.shape):
                # The id of a group along an axis is its first device.
                groups = np.take(numbers, [0], axis).repeat(count, axis).reshape(-1)
                columns.append(np.where(in_mesh, groups[np.where(in_mesh, device_ids, 0)], -1))
        index = self.classes.index(devices)
        firsts = tuple(index.get(int(self.classes.members[c][0]), -1) for c in present)
        speeds = tuple(self.profile.speed_of(int(self.classes.members[c][0])) for c in present)
        return firsts, speeds, tuple(tuple(np.unique(column, return_inverse=True)[1].tolist()) for column in columns)


def _hold_sent_values(ops: Sequence[Op], program: SlotProgram) -> None:
    """Let values that are sent on a stream, and have no later use, die at the next transfer of their devices.

    A runtime keeps the buffer until the transfer is complete, and looks for that when its rank communicates again
    (`runtime.point_to_point`): meanwhile a stage computes its next task.
    """
    names = {name for name in {op.name for op in ops} if Trait.TRANSFER in lookup(name).traits}
    steps, last_use = program.steps, program.last_use
    sets: dict[Devices, int] = {}
    ends: dict[int, tuple[int, int]] = {}
    """The numbers of both device sets of a transfer, by its pattern."""
    held: dict[int, list[int]] = {}
    for number, op in enumerate(ops):
        if op.name not in names or "stream" not in op.attrs:
            continue
        step = steps[number]
        if step.pattern not in ends:
            source, target = op.operands[0].placed.devices, op.results[0].placed.devices
            ends[step.pattern] = sets.setdefault(source, len(sets)), sets.setdefault(target, len(sets))
        sent = [slot for slot in step.operands if slot in step.dead]
        if sent:
            step.dead = [slot for slot in step.dead if slot not in sent]
        for end in ends[step.pattern]:
            for slot in held.pop(end, ()):
                step.dead.append(slot)
                last_use[slot] = number
        if sent:
            held[ends[step.pattern][0]] = sent
    for slots in held.values():
        steps[-1].dead += slots
        last_use[slots] = len(ops) - 1


class _EntryCalls:
    """The calls of an entry function; those of one pattern of steps differ only in operands that vary."""

    def __init__(self, module: Module, gradients: WeightGradients, entry: ExpandedEntry, program: SlotProgram) -> None:
        main = module.main
        self.ops, self.steps = entry.steps.ops, program.steps
        self.gradients = gradients.of(main, (False,) * len(main.outputs))
        self.categories = [ROLE_CATEGORY[main.inputs[number].role] for number in entry.inputs]
        self.ids: dict[object, int] = {}
        self.patterns: dict[int, tuple[int, frozenset[int], tuple[bool, ...]]] = {}
        """For each pattern a part of the key, the inputs that do not vary, and the outputs."""
        self.calls: dict[int, EntryCall] = {}

    def of(self, number: int) -> EntryCall:
        """Return the call of a step."""
        call = self.calls.get(number)
        if call is None:
            call = self.calls[number] = self._call(number)
        return call

    def _call(self, number: int) -> EntryCall:
        step, count = self.steps[number], len(self.categories)
        computed, inputs = step.varying, frozenset[int]()
        if computed and min(computed) < count:
            inputs = frozenset([slot for slot in computed if slot < count])
            computed = [slot for slot in computed if slot >= count]
        if step.pattern not in self.patterns:
            categories = tuple([self.categories[slot] if slot < count else -1 for slot in step.operands])
            outputs = tuple([v.name in self.gradients for v in self.ops[number].results])
            shared = frozenset([slot for slot in step.operands if slot < count]) - inputs
            is_once = len(shared) + len(inputs) + len(computed) == len(step.operands)
            pattern = self.ids.setdefault((step.callee, categories, outputs), len(self.ids)) if is_once else -1
            self.patterns[step.pattern] = pattern, shared, outputs
        pattern, shared, outputs = self.patterns[step.pattern]
        last = tuple(map(set(step.dead).__contains__, computed))
        key = -1 if pattern < 0 else self.ids.setdefault((pattern, last), len(self.ids))
        return EntryCall(key, shared | inputs if inputs else shared, computed, outputs)
