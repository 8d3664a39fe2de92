"""Gathering of output shards on one rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distir_relax.bundle import Tensor, local_intervals, local_shape
from distir_relax.errors import RunError
from distir_relax.layout import DeviceMesh
from distir_relax.runtime.arrays import as_torch, dtype_name, torch_dtype
from distir_relax.runtime.communicator import Communicator

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


def collect_output(comm: Communicator, tensor: Tensor, local: Array | None, root: int = 0) -> torch.Tensor | None:
    """Return the global value of an output on rank `root`, None elsewhere; a torch tensor on the CPU. All call this.

    `local` is this rank's shard in the layout of `tensor`, None if it holds none of it. Replicas are read from the
    lowest rank. This communication is not counted in `traffic`. Raises RunError when `local` does not have the shape
    and dtype of `tensor`.
    """
    comm.progress.enter(f"collecting output {tensor.name}", "gather")
    result = _collect(comm, tensor, None if local is None else as_torch(local), root)
    comm.progress.leave()
    return result


def _collect(comm: Communicator, tensor: Tensor, local: torch.Tensor | None, root: int) -> torch.Tensor | None:
    import torch

    if local is not None:
        expected = (local_shape(tensor, comm.mesh, comm.rank), tensor.dtype)
        actual = (tuple(local.shape), dtype_name(local.dtype))
        if actual != expected:
            raise RunError(
                f"rank {comm.rank} computed {actual[1]} {actual[0]}, the bundle declares {expected[1]} {expected[0]}",
                f"output {tensor.name}",
            )
    senders = owners(comm.mesh, tensor)
    if comm.rank != root:
        if comm.rank in senders and local is not None and local.numel():
            comm._send(local.contiguous().view(-1), root)
        return None
    if senders == [root] and local is not None:
        return local.cpu()
    result = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
    for rank in senders:
        shape = local_shape(tensor, comm.mesh, rank)
        if not math.prod(shape):
            continue
        intervals = local_intervals(tensor, comm.mesh, rank)
        if rank == root and local is not None:
            place(result, local.cpu(), intervals)
        else:
            _receive(comm, rank, shape, result, intervals)
    return result


def _receive(
    comm: Communicator, rank: int, shape: tuple[int, ...], target: torch.Tensor, intervals: list[list[tuple[int, int]]]
) -> None:
    """Receive a rank's part into its place, through a buffer if that is not contiguous."""
    import torch

    view = _block_view(target, intervals)
    if view is not None and view.is_contiguous() and comm.device == "cpu":
        comm._recv(view.view(-1), rank)
        return
    received = torch.empty(shape, dtype=target.dtype, device=comm.device)
    comm._recv(received.view(-1), rank)
    place(target, received.cpu(), intervals)


def place(target: torch.Tensor, part: torch.Tensor, intervals: list[list[tuple[int, int]]]) -> None:
    """Write `part`, whose dims are the joined `intervals` of the dims of `target`, to its place in `target`."""
    import torch

    view = _block_view(target, intervals)
    if view is None:
        index = [torch.cat([torch.arange(a, b) for a, b in pieces]) for pieces in intervals]
        target[torch.meshgrid(*index, indexing="ij")] = part
    else:
        view.copy_(part)


def _block_view(target: torch.Tensor, intervals: list[list[tuple[int, int]]]) -> torch.Tensor | None:
    """Return a view of a part's place; None if it is not a block."""
    if any(len(pieces) != 1 for pieces in intervals):
        return None
    return target[tuple(slice(pieces[0][0], pieces[0][1]) for pieces in intervals)]


def owners(mesh: DeviceMesh, tensor: Tensor) -> list[int]:
    """Return, for each distinct shard, the lowest rank that holds it."""
    return [ranks[0] for ranks in holders(mesh, tensor)]


def holders(mesh: DeviceMesh, tensor: Tensor) -> list[list[int]]:
    """Return, for each distinct shard, the ranks that hold it, in the tensor's order of ranks."""
    ranks: dict[object, list[int]] = {}
    for rank in range(mesh.size) if tensor.ranks is None else tensor.ranks:
        pieces = local_intervals(tensor, mesh, rank)
        ranks.setdefault(tuple(map(tuple, pieces)), []).append(rank)
    return list(ranks.values())
