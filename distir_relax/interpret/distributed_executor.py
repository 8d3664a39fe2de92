"""Reference executor of the distributed stage: all devices in one process, one op at a time.

It runs the schedule itself, before projection and code generation, with the reference semantics of the op table; so it
distinguishes errors of lowering from errors of the runtime. It is the abstract interpreter over tensors per device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distir_relax.errors import RunError, VerificationError
from distir_relax.interpret.interpreter import Domain, Interpreter
from distir_relax.interpret.mesh_groups import axis_groups, mesh_of_axis
from distir_relax.interpret.shard_tensors import assemble, scatter
from distir_relax.ir import DTensorType, Function, Module, Op, PlacedType, Value, remap_devices
from distir_relax.ops import Trait, evaluate, lookup
from distir_relax.ops.table.dispatch import type_of
from distir_relax.ops.table.spmd_inference import local_attrs

if TYPE_CHECKING:
    import torch

LocalTensors = Mapping[int, "torch.Tensor"]
"""The local tensor of each device that has one."""


def execute(sharded: Module, distributed: Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a distributed program; return global outputs by output name, given global inputs by value name.

    `sharded` has the layouts of inputs and outputs. Raises `VerificationError` if a device computes a tensor of another
    type than the program declares, and ValueError if replicas of an output differ.
    """
    input_layouts = {item.value.name: item.value.dtensor for item in sharded.main.inputs}
    output_layouts = {outer.name: outer.value.dtensor for outer in sharded.main.outputs}
    return _execute(distributed, inputs, input_layouts, output_layouts)


def execute_program(distributed: Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Like `execute`, for a program that declares the layouts of its inputs and outputs (``as R.DTensor(…)``).

    An input without a layout is replicated, and an output without one is taken from the first of its devices.
    """
    input_layouts = {item.value.name: item.layout or item.value.placed for item in distributed.main.inputs}
    output_layouts = {outer.name: outer.layout or outer.value.placed for outer in distributed.main.outputs}
    return _execute(distributed, inputs, input_layouts, output_layouts)


def run_devices(distributed: Module, locals_: Mapping[str, LocalTensors]) -> dict[str, LocalTensors]:
    """Run a distributed program; return local outputs by output name, given local inputs by value name.

    Raises `VerificationError` if a device computes a tensor of another type than the program declares.
    """
    results = Interpreter(distributed, _Devices(distributed)).run(
        [locals_[item.value.name] for item in distributed.main.inputs]
    )
    return {output.name: tensors for output, tensors in zip(distributed.main.outputs, results, strict=True)}


def _execute(
    distributed: Module,
    inputs: Mapping[str, torch.Tensor],
    input_layouts: Mapping[str, DTensorType | PlacedType],
    output_layouts: Mapping[str, DTensorType | PlacedType],
) -> dict[str, torch.Tensor]:
    local_inputs: dict[str, LocalTensors] = {}
    for name, layout in input_layouts.items():
        if name not in inputs:
            raise RunError(f"expected a tensor for the input {name!r}, found none")
        if isinstance(layout, DTensorType):
            local_inputs[name] = scatter(inputs[name], layout, distributed.meshes[layout.mesh])
        else:
            local_inputs[name] = dict.fromkeys(layout.devices, inputs[name])
    outputs = {}
    for name, tensors in run_devices(distributed, local_inputs).items():
        layout = output_layouts[name]
        if isinstance(layout, DTensorType):
            outputs[name] = assemble(tensors, layout, distributed.meshes[layout.mesh])
        else:
            outputs[name] = tensors[layout.devices[0]]
    return outputs


Row = tuple["torch.Tensor", ...]


@dataclass
class _Devices(Domain[LocalTensors]):
    """A value is a tensor per device; inside a call, devices are numbered as in the entry function."""

    module: Module
    onto: list[tuple[int, ...] | None] = field(default_factory=lambda: [None])

    def apply(self, op: Op, operands: Sequence[LocalTensors]) -> Sequence[LocalTensors]:
        types = [self._type_of(v) for v in op.results]
        entry = lookup(op.name, op.location)
        if Trait.TRANSFER in entry.traits:
            source = self._type_of(op.operands[0])
            pairs = zip(source.devices, types[0].devices, strict=True)
            rows: dict[int, Row] = {b: (operands[0][a],) for a, b in pairs}
        elif Trait.ON_COMMUNICATOR in entry.traits:
            rows = self._run_collective(op, operands, types[0].devices)
        else:
            rows = _run_local(op, operands, types[0].devices)
        results = [{device: row[number] for device, row in rows.items()} for number in range(len(types))]
        for type_, tensors in zip(types, results, strict=True):
            _check_types(op, type_, tensors)
        return results

    def call(
        self,
        op: Op,
        callee: Function,
        operands: Sequence[LocalTensors],
        last: Sequence[bool],
        run: Callable[[Sequence[LocalTensors]], list[LocalTensors]],
    ) -> list[LocalTensors]:
        devices: tuple[int, ...] = op.attrs["devices"]  # type: ignore[assignment]
        caller_devices = self.onto[-1]
        self.onto.append(devices if caller_devices is None else tuple(caller_devices[i] for i in devices))
        results = run(operands)
        self.onto.pop()
        return results

    def _type_of(self, value: Value) -> PlacedType:
        onto = self.onto[-1]
        return value.placed if onto is None else remap_devices(value.placed, onto)

    def _run_collective(self, op: Op, operands: Sequence[LocalTensors], devices: tuple[int, ...]) -> dict[int, Row]:
        collective = lookup(op.name).semantics.collective_semantics
        assert collective is not None
        axis = str(op.attrs["axis"])
        rows: dict[int, Row] = {}
        index = {device: i for i, device in enumerate(devices)}
        for group in axis_groups(mesh_of_axis(self.module, axis), axis, devices).tolist():
            columns = [[tensors[r] for r in group] for tensors in operands]
            parts = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
            try:
                results = collective(parts, local_attrs(op.attrs, index[group[0]]))
            except (ValueError, RuntimeError, IndexError) as error:
                raise RunError(f"{op.name} of ranks {group}: {error}", op.location) from None
            for r, result in zip(group, results, strict=True):
                rows[r] = (result,)
        return rows


def _run_local(op: Op, operands: Sequence[LocalTensors], devices: tuple[int, ...]) -> dict[int, Row]:
    rows = {}
    for index, rank in enumerate(devices):
        operands_here = [x[rank] for x in operands if rank in x]
        values = tuple(Value(f"x{i}", type_of(x)) for i, x in enumerate(operands_here))
        rows[rank] = evaluate(Op(op.name, values, (), local_attrs(op.attrs, index), op.location), operands_here)
    return rows


def _check_types(op: Op, type_: PlacedType, tensors: LocalTensors) -> None:
    for index, rank in enumerate(type_.devices):
        actual = type_of(tensors[rank])
        if actual != type_.local(index):
            raise VerificationError(f"{op.name} on rank {rank} is {type_.local(index)}, computed {actual}", op.location)
