"""State of a loaded program (the weights that it updates), read and written as global tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from distir_relax.bundle import Bundle, Manifest, Tensor, TensorWeights, WeightSource, local_intervals
from distir_relax.checkpoints import StateFile
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import as_torch, dtype_name
from distir_relax.runtime.outputs import owners
from distir_relax.support.units import listed

if TYPE_CHECKING:
    from distir_relax.runtime.arrays import Array
    from distir_relax.runtime.backends import RankProgram


def changing(manifest: Manifest) -> list[Tensor]:
    """Return the weights that the programs update, in the manifest's order."""
    return [tensor for tensor in manifest.weights if tensor.name in manifest.updates]


def copy_state(
    bundle: Bundle, program: RankProgram, rank: int, other: Manifest, source: RankProgram, suffix: str = ""
) -> None:
    """Copy a rank's shards of the state of `program` from those of another program, which has the same layouts.

    Those that the other has under their name and `suffix`, too, are copied from there. Those that it does not have are
    as in the program's bundle. Raises RunError for a weight that the other has in another layout.
    """
    theirs = {tensor.name: tensor for tensor in other.weights}
    for tensor in changing(bundle.manifest):
        name = tensor.name + suffix if tensor.name + suffix in source.state else tensor.name
        if name not in theirs:
            if tensor.is_on(rank):
                shard = bundle.weights.read(name, local_intervals(tensor, bundle.manifest.mesh, rank))
                program.state[name].copy_(shard)
            continue
        if replace(theirs[name], name=tensor.name) != tensor:
            found = f"{theirs[name].dtype} {theirs[name].placement}"
            raise RunError(f"expected {name} as {tensor.dtype} {tensor.placement}, found {found}", other.name)
        if tensor.name in program.state:
            program.state[tensor.name].copy_(source.state[name])


def checked_source(manifest: Manifest, state: Mapping[str, Array] | WeightSource) -> WeightSource:
    """Return the source of each rank's shards. Raises RunError unless the arrays match the program's state."""
    if not isinstance(state, Mapping):
        return state
    expected = {tensor.name: tensor for tensor in changing(manifest)}
    for name, tensor in expected.items():
        if name not in state:
            raise RunError("the state is missing", name, f"the program changes {_listed(expected)}")
        actual = (dtype_name(as_torch(state[name]).dtype), tuple(state[name].shape))
        if actual != (tensor.dtype, tensor.shape):
            raise RunError(f"expected {tensor.dtype} {tensor.shape}, found {actual[0]} {actual[1]}", name)
    for name in state:
        if name not in expected:
            raise RunError("the program changes no such weight", name, f"it changes {_listed(expected)}")
    return TensorWeights({name: as_torch(value) for name, value in state.items()})


def write_state(manifest: Manifest, program: RankProgram, rank: int, source: WeightSource) -> None:
    """Copy this rank's shards of `source` into the state of its program."""
    for tensor in changing(manifest):
        write_tensor(manifest, program, rank, tensor, source)


def write_tensor(manifest: Manifest, program: RankProgram, rank: int, tensor: Tensor, source: WeightSource) -> None:
    """Copy this rank's shards of one tensor of `source` into the state of its program."""
    if tensor.is_on(rank):
        program.state[tensor.name].copy_(source.read(tensor.name, local_intervals(tensor, manifest.mesh, rank)))


def save_pieces(manifest: Manifest, program: RankProgram, rank: int, file: StateFile) -> None:
    """Write this rank's shards of the state into a file of global tensors; of replicas, the lowest rank's."""
    for tensor in changing(manifest):
        if rank in owners(manifest.mesh, tensor):
            file.write(tensor.name, local_intervals(tensor, manifest.mesh, rank), program.state[tensor.name])


def _listed(tensors: Mapping[str, Tensor]) -> str:
    return listed(list(tensors), 6) or "nothing"
