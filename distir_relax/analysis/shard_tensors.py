"""Tensors and their layouts: from a global tensor to what each device holds, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distir_relax.ir import DTensorType
from distir_relax.layout import DeviceMesh, Partial, Placement, held_intervals, holds

if TYPE_CHECKING:
    import torch


def scatter(tensor: torch.Tensor, kind: DTensorType, mesh: DeviceMesh) -> dict[int, torch.Tensor]:
    """What each device of `mesh` that holds some of `tensor`, laid out as `kind`, holds of it.

    Along an axis of ``I`` the devices hold unlike terms, drawn at random but always the same, so that no op can be
    right on them by chance.
    """
    import torch

    wholes: dict[tuple[int, ...], torch.Tensor] = {(): tensor}
    generator = torch.Generator().manual_seed(len(kind.shape) + 1)
    pending = [axis for axis, placement in enumerate(kind.placements) if isinstance(placement, Partial)]
    for axis in pending:
        split = {at: _terms(whole, kind.placements[axis], mesh.shape[axis], generator) for at, whole in wholes.items()}
        wholes = {(*at, i): term for at, terms in split.items() for i, term in enumerate(terms)}
    found = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        if not holds(kind.placements, coordinates):
            continue
        local = wholes[tuple(coordinates[axis] for axis in pending)]
        for dim, index in enumerate(_index(kind, mesh, rank)):
            if len(index) != kind.shape[dim]:
                local = local.index_select(dim, index)
        found[rank] = local.contiguous()
    return found


def assemble(locals_: Mapping[int, torch.Tensor], kind: DTensorType, mesh: DeviceMesh) -> torch.Tensor:
    """The global tensor from what each device holds, terms reduced.

    Raises ValueError when devices that should agree do not.
    """
    import torch

    held = {mesh.coordinates(rank): local for rank, local in locals_.items()}
    for axis, placement in enumerate(kind.placements):
        if isinstance(placement, Partial):
            held = {
                at: _reduced([held[(*at[:axis], i, *at[axis + 1 :])] for i in range(mesh.shape[axis])], placement)
                for at in held
            }
    result = torch.zeros(kind.shape, dtype=next(iter(locals_.values())).dtype)
    seen = torch.zeros(kind.shape, dtype=torch.bool)
    for rank in sorted(locals_):
        index = _index(kind, mesh, rank)
        where = torch.meshgrid(*index, indexing="ij") if index else ()
        local = held[mesh.coordinates(rank)]
        if (seen[where] & (result[where] != local) & ~(result[where].isnan() & local.isnan())).any():
            raise ValueError(f"rank {rank} holds other numbers than the ranks before it")
        result[where] = local
        seen[where] = True
    return result


def _index(kind: DTensorType, mesh: DeviceMesh, rank: int) -> list[torch.Tensor]:
    """For each dim, the elements that a device holds."""
    import torch

    found = []
    for dim, size in enumerate(kind.shape):
        pieces = held_intervals(kind.placements, dim, size, mesh.coordinates(rank))
        found.append(torch.cat([torch.arange(a, b) for a, b in pieces] or [torch.arange(0)]))
    return found


def _terms(whole: torch.Tensor, placement: Placement, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Tensors whose reduction is `whole`."""
    import torch

    assert isinstance(placement, Partial)
    reduction = placement.reduction
    noise = [torch.randn(whole.shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    if reduction in ("max", "min"):
        owner = torch.randint(0, count, whole.shape, generator=generator)
        sign = -1 if reduction == "max" else 1
        return [torch.where(owner == i, whole, whole + (sign * n.abs()).to(whole.dtype)) for i, n in enumerate(noise)]
    # Multiples of an eighth: sums of them are exact, so that terms of whole numbers are as good as the numbers.
    found = [((8 * n).round() / 8 if whole.dtype.is_floating_point else (4 * n).round()).to(whole.dtype) for n in noise]
    found[0] = whole * (count if reduction == "mean" else 1) - sum(found[1:], torch.zeros_like(whole))
    return found


def _reduced(parts: Sequence[torch.Tensor], placement: Partial) -> torch.Tensor:
    import torch

    stacked = torch.stack(list(parts))
    if placement.reduction == "sum":
        return stacked.sum(0).to(stacked.dtype)
    if placement.reduction == "mean":
        return stacked.mean(0)
    return stacked.amax(0) if placement.reduction == "max" else stacked.amin(0)
