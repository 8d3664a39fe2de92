"""Memory to assemble a program's outputs on rank 0, as records for the simulator."""

from __future__ import annotations

import math

from distir_relax.errors import DistIRError
from distir_relax.ir import CachedState, Function, Module, OutputAssembly, Value, at_rank
from distir_relax.layout import DTYPES, DeviceMesh, Shard, UndecidedSize, maximum
from distir_relax.ops import lookup


def assemble_outputs(sharded: Module, placed: Function, mesh: DeviceMesh) -> tuple[OutputAssembly, ...]:
    """Return a record for each output of a sharded program, given its entry function in distributed form.

    Updated weights and states stay on their devices, and have no record. Raises `DistIRError` for an output whose
    shards interleave a symbolic number of parts.
    """
    updated = {op.results[0].name for op in sharded.main.ops if not op.callee and lookup(op.name).updates}
    states = {record.output for record in sharded.records if isinstance(record, CachedState)}
    records = []
    for sharded_output, placed_output in zip(sharded.main.outputs, placed.outputs, strict=True):
        if sharded_output.value.name not in updated and sharded_output.name not in states:
            try:
                contiguous = _is_contiguous(sharded_output.value, mesh)
            except UndecidedSize as error:
                raise DistIRError(
                    f"the output {sharded_output.name!r} cannot be assembled from its shards: {error.message}",
                    hint="return it before it is reshaped, or annotate it R before",
                ) from None
            buffer = 0 if contiguous else _largest_part(placed_output.value)
            kind = sharded_output.value.dtensor
            records.append(OutputAssembly(sharded_output.name, kind.tensor.elements * DTYPES[kind.dtype][1], buffer))
    return tuple(records)


def _is_contiguous(value: Value, mesh: DeviceMesh) -> bool:
    """Whether each device's part is one interval of the flat tensor, which is received in place."""
    kind = value.dtensor
    for axis, placement in enumerate(kind.placements):
        if isinstance(placement, Shard):
            assert placement.cut is not None
            pieces = max((len(placement.cut.intervals(i)) for i in range(mesh.shape[axis])), default=0)
            if pieces > 1 or math.prod(kind.shape[: placement.dim]) != 1:
                return False
    return True


def _largest_part(value: Value) -> int:
    kind = value.placed
    count = len(kind.devices)
    parts = {math.prod(at_rank(size, i) for size in kind.shape) for i in range(count)}
    return maximum(0, *parts) * DTYPES[kind.dtype][1]
