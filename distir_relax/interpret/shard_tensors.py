"""Conversion between global tensors and their local shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.ir import DTensorType
from distir_relax.layout import DeviceMesh, Partial, Placement, has_shard, local_intervals

if TYPE_CHECKING:
    import torch


def scatter(tensor: torch.Tensor, layout: DTensorType, mesh: DeviceMesh) -> dict[int, torch.Tensor]:
    """Return the local tensors of `tensor` with `layout`, by device of `mesh`.

    Along an axis of ``I`` the devices get different terms, from a fixed random sequence, so that no op can be correct
    on them by chance.
    """
    import torch

    parts: dict[tuple[int, ...], torch.Tensor] = {(): tensor}
    generator = torch.Generator().manual_seed(len(layout.shape) + 1)
    partial_axes = [axis for axis, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    for axis in partial_axes:
        split = {at: _terms(whole, layout.placements[axis], mesh.shape[axis], generator) for at, whole in parts.items()}
        parts = {(*at, i): term for at, terms in split.items() for i, term in enumerate(terms)}
    shards = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        if not has_shard(layout.placements, coordinates):
            continue
        local = parts[tuple(coordinates[axis] for axis in partial_axes)]
        for dim, index in enumerate(shard_indices(layout, mesh, rank)):
            if len(index) != layout.shape[dim]:
                local = local.index_select(dim, index)
        shards[rank] = local.contiguous()
    return shards


def assemble(locals_: Mapping[int, torch.Tensor], layout: DTensorType, mesh: DeviceMesh) -> torch.Tensor:
    """Return the global tensor from local ones, partial sums reduced.

    Raises ValueError if replicas differ.
    """
    import torch

    locals_ = reduce_pending(locals_, layout, mesh)
    result = torch.zeros(layout.shape, dtype=next(iter(locals_.values())).dtype)
    seen = torch.zeros(layout.shape, dtype=torch.bool)
    for rank in sorted(locals_):
        index = shard_indices(layout, mesh, rank)
        where = torch.meshgrid(*index, indexing="ij") if index else ()
        local = locals_[rank]
        if (seen[where] & (result[where] != local) & ~(result[where].isnan() & local.isnan())).any():
            raise ValueError(f"rank {rank} has different values than the ranks before it")
        result[where] = local
        seen[where] = True
    return result


def reduce_pending(
    locals_: Mapping[int, torch.Tensor], layout: DTensorType, mesh: DeviceMesh
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Return the local tensors of devices with pending reductions done, by device."""
    parts = {mesh.coordinates(rank): local for rank, local in locals_.items()}
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            parts = {
                at: _reduced([parts[(*at[:axis], i, *at[axis + 1 :])] for i in range(mesh.shape[axis])], placement)
                for at in parts
            }
    return {rank: parts[mesh.coordinates(rank)] for rank in locals_}


def shard_indices(layout: DTensorType, mesh: DeviceMesh, rank: int) -> list[torch.Tensor]:
    """Return the indices of the elements of a global tensor that a device has, for each dim."""
    import torch

    indices = []
    for dim, size in enumerate(layout.shape):
        pieces = local_intervals(layout.placements, dim, size, mesh.coordinates(rank))
        indices.append(torch.cat([torch.arange(a, b) for a, b in pieces] or [torch.arange(0)]))
    return indices


def _terms(whole: torch.Tensor, placement: Placement, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return random tensors whose reduction is `whole`."""
    import torch

    assert isinstance(placement, Partial)
    reduction = placement.reduction
    noise = [torch.randn(whole.shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    if reduction in ("max", "min"):
        owner = torch.randint(0, count, whole.shape, generator=generator)
        sign = -1 if reduction == "max" else 1
        return [torch.where(owner == i, whole, whole + (sign * n.abs()).to(whole.dtype)) for i, n in enumerate(noise)]
    # Multiples of 1/8, whose sums are exact: terms of integers give exactly the integers.
    terms = [((8 * n).round() / 8 if whole.dtype.is_floating_point else (4 * n).round()).to(whole.dtype) for n in noise]
    terms[0] = whole * (count if reduction == "mean" else 1) - sum(terms[1:], torch.zeros_like(whole))
    return terms


def _reduced(parts: Sequence[torch.Tensor], placement: Partial) -> torch.Tensor:
    import torch

    stacked = torch.stack(list(parts))
    if placement.reduction == "sum":
        return stacked.sum(0).to(stacked.dtype)
    if placement.reduction == "mean":
        return stacked.mean(0)
    return stacked.amax(0) if placement.reduction == "max" else stacked.amin(0)
