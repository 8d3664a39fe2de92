"""The reference executor of the distributed stage: all devices in one process, one op at a time.

It runs the schedule itself, before projection and emission, with the reference semantics of the op table; so it tells
an error of lowering from one of the runtime. It is the abstract interpreter over tensors, one for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distir_relax.analysis.device_classes import groups_along, mesh_with
from distir_relax.analysis.interpreter import Domain, Interpreter
from distir_relax.analysis.shard_tensors import assemble, scatter
from distir_relax.errors import RunError, VerificationError
from distir_relax.ir import DTensorType, Function, Module, Op, PlacedType, Value, on_devices
from distir_relax.ops import Trait, evaluate, lookup
from distir_relax.ops.table.dispatch import type_of
from distir_relax.ops.table.type_checks import local_attrs

if TYPE_CHECKING:
    import torch

Held = Mapping[int, "torch.Tensor"]
"""The local tensor of each device that has one."""


def execute(sharded: Module, distributed: Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The global outputs of a DistIR program by output name, from global inputs by value name.

    `sharded` says how inputs and outputs lie. Raises `VerificationError` when a device computes a tensor of another
    type than the program says, and ValueError when devices that hold the same part of an output disagree.
    """
    into = {item.value.name: item.value.dtensor for item in sharded.main.inputs}
    out = {outer.name: outer.value.dtensor for outer in sharded.main.outputs}
    return _execute(distributed, inputs, into, out)


def execute_program(distributed: Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Like `execute`, for a program whose own inputs and outputs say how they lie (``as R.DTensor(…)``).

    What has no layout is taken, and given, as it is on the first of its devices.
    """
    into = {item.value.name: item.layout or item.value.placed for item in distributed.main.inputs}
    out = {outer.name: outer.layout or outer.value.placed for outer in distributed.main.outputs}
    return _execute(distributed, inputs, into, out)


def run_devices(distributed: Module, locals_: Mapping[str, Held]) -> dict[str, Held]:
    """What each device holds of each output, by output name, from what each holds of each input, by value name.

    Raises `VerificationError` when a device computes a tensor of another type than the program says.
    """
    found = Interpreter(distributed, _Devices(distributed)).run(
        [locals_[item.value.name] for item in distributed.main.inputs]
    )
    return {output.name: held for output, held in zip(distributed.main.outputs, found, strict=True)}


def _execute(
    distributed: Module,
    inputs: Mapping[str, torch.Tensor],
    into: Mapping[str, DTensorType | PlacedType],
    out: Mapping[str, DTensorType | PlacedType],
) -> dict[str, torch.Tensor]:
    held: dict[str, Held] = {}
    for name, layout in into.items():
        if name not in inputs:
            raise RunError(f"expected a tensor for the input {name!r}, found none")
        if isinstance(layout, DTensorType):
            held[name] = scatter(inputs[name], layout, distributed.meshes[layout.mesh])
        else:
            held[name] = dict.fromkeys(layout.devices, inputs[name])
    outputs = {}
    for name, found in run_devices(distributed, held).items():
        layout = out[name]
        if isinstance(layout, DTensorType):
            outputs[name] = assemble(found, layout, distributed.meshes[layout.mesh])
        else:
            outputs[name] = found[layout.devices[0]]
    return outputs


Row = tuple["torch.Tensor", ...]


@dataclass
class _Devices(Domain[Held]):
    """A value is what each device holds of it; inside a call, devices keep the numbers that they have outside."""

    module: Module
    onto: list[tuple[int, ...] | None] = field(default_factory=lambda: [None])

    def apply(self, op: Op, operands: Sequence[Held]) -> Sequence[Held]:
        kinds = [self._kind(v) for v in op.results]
        entry = lookup(op.name, op.location)
        if Trait.TRANSFER in entry.traits:
            source = self._kind(op.operands[0])
            pairs = zip(source.devices, kinds[0].devices, strict=True)
            rows: dict[int, Row] = {b: (operands[0][a],) for a, b in pairs}
        elif Trait.ON_COMMUNICATOR in entry.traits:
            rows = self._together(op, operands, kinds[0].devices)
        else:
            rows = _apart(op, operands, kinds[0].devices)
        found = [{device: row[number] for device, row in rows.items()} for number in range(len(kinds))]
        for kind, held in zip(kinds, found, strict=True):
            _check(op, kind, held)
        return found

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[Held],
        last: Sequence[bool],
        run: Callable[[Sequence[Held]], list[Held]],
    ) -> list[Held]:
        devices: tuple[int, ...] = op.attrs["devices"]  # type: ignore[assignment]
        above = self.onto[-1]
        self.onto.append(devices if above is None else tuple(above[i] for i in devices))
        found = run(operands)
        self.onto.pop()
        return found

    def _kind(self, value: Value) -> PlacedType:
        onto = self.onto[-1]
        return value.placed if onto is None else on_devices(value.placed, onto)

    def _together(self, op: Op, operands: Sequence[Held], devices: tuple[int, ...]) -> dict[int, Row]:
        together = lookup(op.name).semantics.together
        assert together is not None
        axis = str(op.attrs["axis"])
        rows: dict[int, Row] = {}
        index = {device: i for i, device in enumerate(devices)}
        for group in groups_along(mesh_with(self.module, axis), axis, devices).tolist():
            columns = [[held[r] for r in group] for held in operands]
            parts = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
            for r, result in zip(group, together(parts, local_attrs(op.attrs, index[group[0]])), strict=True):
                rows[r] = (result,)
        return rows


def _apart(op: Op, operands: Sequence[Held], devices: tuple[int, ...]) -> dict[int, Row]:
    rows = {}
    for index, rank in enumerate(devices):
        held = [x[rank] for x in operands if rank in x]
        values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(held))
        rows[rank] = evaluate(Op(op.name, values, (), local_attrs(op.attrs, index), op.location), held)
    return rows


def _check(op: Op, kind: PlacedType, found: Held) -> None:
    for index, rank in enumerate(kind.devices):
        actual = type_of(found[rank])
        if actual != kind.local(index):
            raise VerificationError(f"{op.name} on rank {rank} is {kind.local(index)}, computed {actual}", op.location)
