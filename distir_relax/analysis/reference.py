"""The reference executor of the distributed stage: all devices in one process, one op at a time.

It runs the schedule itself, before projection and emission, with the reference semantics of the op table; so it tells
an error of lowering from one of the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.analysis.layout import assemble, scatter
from distir_relax.errors import VerificationError
from distir_relax.ir import DeviceMesh, DTensorType, Module, Op, PlacedType, TensorType, Value
from distir_relax.ops import evaluate, lookup
from distir_relax.ops.check import local_attrs

if TYPE_CHECKING:
    import torch


def execute(sharded: Module, distributed: Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The global outputs of a DistIR program by output name, from global inputs by value name.

    `sharded` says how inputs and outputs lie. Raises `VerificationError` when a device computes a tensor of another
    type than the program says, and ValueError when devices that hold the same part of an output disagree.
    """
    mesh = distributed.meshes[0]
    values: dict[str, list[torch.Tensor]] = {}
    for item in sharded.main.inputs:
        assert isinstance(item.value.type, DTensorType)
        values[item.value.name] = scatter(inputs[item.value.name], item.value.type, mesh)
    held = run_devices(distributed, values)
    outputs = {}
    for outer in sharded.main.outputs:
        assert isinstance(outer.value.type, DTensorType)
        outputs[outer.name] = assemble(held[outer.name], outer.value.type, mesh)
    return outputs


def run_devices(distributed: Module, locals_: Mapping[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """What each device holds of each output, by output name, from what each holds of each input, by value name.

    Raises `VerificationError` when a device computes a tensor of another type than the program says.
    """
    mesh = distributed.meshes[0]
    values = {name: dict(enumerate(tensors)) for name, tensors in locals_.items()}
    for op in distributed.main.ops:
        operands = [values[v.name] for v in op.operands]
        entry = lookup(op.name)
        if entry.role == "transfer":
            rows = _transferred(op, operands[0])
        else:
            rows = _together(op, operands, mesh) if entry.on_communicator else _apart(op, operands)
        for number, value in enumerate(op.results):
            values[value.name] = {rank: row[number] for rank, row in rows.items()}
            _check(op, value.type, values[value.name])
    return {
        output.name: [values[output.value.name][rank] for rank in range(mesh.size)]
        for output in distributed.main.outputs
    }


Held = dict[int, "torch.Tensor"]
"""The local tensor of each device that has one."""

Row = tuple["torch.Tensor", ...]


def _apart(op: Op, operands: list[Held]) -> dict[int, Row]:
    kind = op.results[0].type
    assert isinstance(kind, PlacedType)
    rows = {}
    for index, rank in enumerate(kind.devices):
        held = [x[rank] for x in operands if rank in x]
        values = tuple(Value(f"x{i}", _type_of(x)) for i, x in enumerate(held))
        rows[rank] = evaluate(Op(op.name, values, (), local_attrs(op.attrs, index), op.location), held)
    return rows


def _transferred(op: Op, operand: Held) -> dict[int, Row]:
    source, target = op.operands[0].type, op.results[0].type
    assert isinstance(source, PlacedType)
    assert isinstance(target, PlacedType)
    return {b: (operand[a],) for a, b in zip(source.devices, target.devices, strict=True)}


def _together(op: Op, operands: list[Held], mesh: DeviceMesh) -> dict[int, Row]:
    together = lookup(op.name).together
    assert together is not None
    axis = mesh.axes.index(str(op.attrs["axis"]))
    rows: dict[int, Row] = {}
    for rank in range(mesh.size):
        if rank in rows:
            continue
        here = mesh.coordinates(rank)
        group = [
            r
            for r in range(mesh.size)
            if all(a == b or i == axis for i, (a, b) in enumerate(zip(mesh.coordinates(r), here, strict=True)))
        ]
        parts = [operands[0][r] for r in group] if operands else []
        for r, result in zip(group, together(parts, local_attrs(op.attrs, group[0])), strict=True):
            rows[r] = (result,)
    return rows


def _check(op: Op, kind: object, found: Held) -> None:
    assert isinstance(kind, PlacedType)
    for index, rank in enumerate(kind.devices):
        actual = _type_of(found[rank])
        if actual != kind.local(index):
            raise VerificationError(f"{op.name} on rank {rank} is {kind.local(index)}, computed {actual}", op.location)


def _type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
