"""Tensors and their layouts: from a global tensor to what each device holds, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distir_relax.ir import DeviceMesh, DTensorType, Partial, Shard

if TYPE_CHECKING:
    import torch


def scatter(tensor: torch.Tensor, kind: DTensorType, mesh: DeviceMesh) -> list[torch.Tensor]:
    """What each device of `mesh` holds of `tensor` laid out as `kind`. An ``I`` layout has no single answer: ValueError."""
    import torch

    found = []
    for rank in range(mesh.size):
        local = tensor
        for axis, placement in enumerate(kind.placements):
            if isinstance(placement, Partial):
                raise ValueError(f"{placement} does not say which terms the devices hold")
            if isinstance(placement, Shard):
                assert placement.cut is not None
                pieces = placement.cut.intervals(mesh.coordinates(rank)[axis])
                parts = [local.narrow(placement.dim, a, b - a) for a, b in pieces]
                local = torch.cat(parts, placement.dim) if parts else local.narrow(placement.dim, 0, 0)
        found.append(local.contiguous())
    return found


def assemble(locals_: Sequence[torch.Tensor], kind: DTensorType, mesh: DeviceMesh) -> torch.Tensor:
    """The global tensor from what each device holds; raises ValueError when devices that should agree do not."""
    import torch

    result = torch.zeros(kind.shape, dtype=locals_[0].dtype)
    seen = torch.zeros(kind.shape, dtype=torch.bool)
    for rank in range(mesh.size):
        index = [torch.arange(n) for n in kind.shape]
        for axis, placement in enumerate(kind.placements):
            if isinstance(placement, Shard):
                assert placement.cut is not None
                pieces = placement.cut.intervals(mesh.coordinates(rank)[axis])
                index[placement.dim] = torch.cat([torch.arange(a, b) for a, b in pieces] or [torch.arange(0)])
        where = torch.meshgrid(*index, indexing="ij") if index else ()
        local = locals_[rank]
        if (seen[where] & (result[where] != local) & ~(result[where].isnan() & local.isnan())).any():
            raise ValueError(f"rank {rank} holds other numbers than the ranks before it")
        result[where] = local
        seen[where] = True
    return result
