"""Roles of the ranks of a bundle: place on the mesh, weights, and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.bundle import Manifest, local_bytes
from distir_relax.runtime.requests import bytes_per_token
from distir_relax.support.units import size


def rank_roles(manifest: Manifest, idle: Sequence[Sequence[float]] = ((),)) -> list[dict[str, Any]]:
    """Return a row for each rank of each replica: its index along each mesh axis of several devices, weights, cache.

    `idle` has for each replica the share of the time in which its ranks are idle, or nothing.
    """
    return [
        {**row, "place": _place(row["place"], replica, len(idle)), "idle": f"{shares[rank]:.0%}" if shares else ""}
        for replica, shares in enumerate(idle)
        for rank, row in enumerate(_roles(manifest))
    ]


def _place(place: str, replica: int, count: int) -> str:
    if count == 1:
        return place or "the whole model"
    return ", ".join(filter(None, (f"replica {replica + 1} of {count}", place)))


def _roles(manifest: Manifest) -> list[dict[str, Any]]:
    mesh = manifest.mesh
    rows = []
    for rank in range(mesh.size):
        place = [
            f"{axis} {index + 1} of {count}"
            for axis, index, count in zip(mesh.axes, mesh.coordinates(rank), mesh.shape, strict=True)
            if count > 1
        ]
        weights = sum(local_bytes(tensor, mesh, rank) for tensor in manifest.weights)
        rows.append(
            {
                "rank": rank,
                "place": ", ".join(place),
                "weights": size(weights),
                "cache_per_token": size(bytes_per_token(manifest, rank)),
            }
        )
    return rows
