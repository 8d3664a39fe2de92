"""The reference executor of the distributed stage: all devices in one process, one op at a time.

It runs the schedule itself, before projection and emission, with the reference semantics of the op table; so it tells
an error of lowering from one of the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distir_relax.analysis.layout import assemble, scatter
from distir_relax.errors import VerificationError
from distir_relax.ir import DeviceMesh, DTensorType, Module, Op, PlacedType, TensorType
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
    values = dict(locals_)
    for op in distributed.main.ops:
        operands = [values[v.name] for v in op.operands]
        rows = _together(op, operands, mesh) if lookup(op.name).on_communicator else _apart(op, operands, mesh)
        for number, value in enumerate(op.results):
            values[value.name] = [row[number] for row in rows]
            _check(op, value.type, values[value.name])
    return {output.name: values[output.value.name] for output in distributed.main.outputs}


def _apart(op: Op, operands: list[list[torch.Tensor]], mesh: DeviceMesh) -> list[tuple[torch.Tensor, ...]]:
    rows = []
    for rank in range(mesh.size):
        local = Op(op.name, op.operands, op.results, local_attrs(op.attrs, rank), op.location)
        rows.append(evaluate(local, [x[rank] for x in operands]))
    return rows


def _together(op: Op, operands: list[list[torch.Tensor]], mesh: DeviceMesh) -> list[tuple[torch.Tensor, ...]]:
    together = lookup(op.name).together
    assert together is not None
    axis = mesh.axes.index(str(op.attrs["axis"]))
    rows: dict[int, tuple[torch.Tensor, ...]] = {}
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
    return [rows[rank] for rank in range(mesh.size)]


def _check(op: Op, kind: object, found: list[torch.Tensor]) -> None:
    assert isinstance(kind, PlacedType)
    for rank, tensor in enumerate(found):
        actual = TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if actual != kind.local(rank):
            raise VerificationError(f"{op.name} on rank {rank} is {kind.local(rank)}, computed {actual}", op.location)
