"""What simulations share of programs that are the same but for sizes: what is done in which order, and where.

A search simulates a strategy at many batches. Its programs have the same ops on the same values, whose types differ; so
the order of ops, where values are used for the last time, which devices do the same, and which values are gradients of
weights are found once. Devices are told apart by the sizes of their parts too: sizes that are not the same on all of
them must be those of the other program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distir_relax.analysis.device_classes import DeviceClasses, Devices
from distir_relax.analysis.interpreter import Code, Step, code_of
from distir_relax.analysis.memory_categories import OF_ROLE, Gradients
from distir_relax.analysis.microbatch_expansion import Entry, entry_of
from distir_relax.cost.profile import Profile
from distir_relax.ir import Function, Module, Op, verify_no_recursion
from distir_relax.ops import lookup


@dataclass(frozen=True, slots=True)
class Use:
    """A call of the entry function, but for what is not among the inputs of that.

    Its operands in slots of `others` are what the program has made, in those of `inputs` the entry's own inputs. `kind`
    is the same for calls of one function in which the latter are of the same categories, and the same results are
    gradients (`outputs`); it is -1 where two operands are one input.
    """

    kind: int
    inputs: frozenset[int]
    others: list[int]
    other_last: list[bool]
    outputs: tuple[bool, ...]


@dataclass
class Structure:
    """What is known of a program of the distributed stage, whatever the sizes of its tensors that all devices share.

    Raises `VerificationError` where microbatches that are written out do not do the same, or a function calls itself.
    """

    module: Module
    profile: Profile
    classes: DeviceClasses = field(init=False)
    entry: Entry = field(init=False)
    code: Code = field(init=False)
    codes: dict[str, Code] = field(default_factory=dict)
    """Of functions that are called, by name."""
    streams: dict[str, int] = field(init=False)
    """The number of each stream, from 1 on."""
    changes: bool = field(init=False)
    """Whether ops change their operands in place."""
    gradients: Gradients = field(init=False)
    uses: list[Use | None] = field(init=False)
    """Of each step of the entry, if it is a call."""
    _made_on: dict[str, dict[str, int]] = field(default_factory=dict)
    _streams_in: dict[str, bool] = field(default_factory=dict)
    _forms: dict[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module = self.module
        self.classes = DeviceClasses(module, self.profile)
        verify_no_recursion(module)
        names = {str(op.attrs["stream"]) for f in module.functions for op in f.ops if "stream" in op.attrs}
        self.streams = {name: i + 1 for i, name in enumerate(sorted(names))}
        self.changes = any(lookup(op.name, op.location).code.in_place for f in module.functions for op in f.ops)
        self.gradients = Gradients(module)
        self.entry = entry_of(module)
        self.code = code_of(self.entry.steps)
        kinds: dict[object, int] = {}
        mine = self.gradients.of(module.main, (False,) * len(module.main.outputs))
        categories = [OF_ROLE[module.main.inputs[number].role] for number in self.entry.inputs]
        categories += [-1] * (self.code.slots - len(categories))
        pairs = zip(self.entry.steps.ops, self.code.steps, strict=True)
        self.uses = [_use(op, step, categories, mine, kinds) if step.callee else None for op, step in pairs]

    def made_on(self, function: Function) -> dict[str, int]:
        """The streams of those values of a function that are made on one."""
        found = self._made_on.get(function.name)
        if found is None:
            ops = [op for op in function.ops if "stream" in op.attrs]
            found = {v.name: self.streams[str(op.attrs["stream"])] for op in ops for v in op.results}
            self._made_on[function.name] = found
        return found

    def uses_streams(self, function: Function) -> bool:
        """Whether a function, or one that it calls, does something on a stream."""
        found = self._streams_in.get(function.name)
        if found is None:
            called = (self.module.function(op.callee) for op in function.ops if op.callee)
            found = any("stream" in op.attrs for op in function.ops) or any(map(self.uses_streams, called))
            self._streams_in[function.name] = found
        return found

    def form(self, devices: Devices, present: Sequence[int]) -> object:
        """What is the same of device sets on which functions do the same: how they lie in the machine and in groups,
        and which are of one class. `present` are their classes."""
        found = self._forms.get(id(devices))
        if found is None:
            found = self._forms[id(devices)] = self._form(devices, present)
        return found

    def _form(self, devices: Devices, present: Sequence[int]) -> object:
        places = np.array(devices, dtype=np.int64)
        rows = [self.classes.of[places]]
        rows += [places // level.size for level in self.profile.levels]
        for mesh in self.module.meshes:
            numbers = np.arange(mesh.size).reshape(mesh.shape)
            inside = places < mesh.size
            for axis, count in enumerate(mesh.shape):
                # A group along an axis has the number of its first device.
                groups = np.take(numbers, [0], axis).repeat(count, axis).reshape(-1)
                rows.append(np.where(inside, groups[np.where(inside, places, 0)], -1))
        index = self.classes.index(devices)
        firsts = tuple(index.get(int(self.classes.members[c][0]), -1) for c in present)
        speeds = tuple(self.profile.speed_of(int(self.classes.members[c][0])) for c in present)
        return firsts, speeds, tuple(tuple(np.unique(row, return_inverse=True)[1].tolist()) for row in rows)


def _use(op: Op, step: Step, categories: Sequence[int], gradients: frozenset[str], kinds: dict[object, int]) -> Use:
    """`categories` are those of the values in slots, -1 for what the program makes."""
    outputs = tuple([v.name in gradients for v in op.results])
    what = tuple(map(categories.__getitem__, step.operands))
    places = [place for place, category in enumerate(what) if category < 0]
    others = [step.operands[place] for place in places]
    inputs = frozenset(step.operands).difference(others)
    is_once = len(inputs) + len(others) == len(step.operands)
    kind = kinds.setdefault((step.callee, what, outputs), len(kinds)) if is_once else -1
    return Use(kind, inputs, others, [step.last[place] for place in places], outputs)
