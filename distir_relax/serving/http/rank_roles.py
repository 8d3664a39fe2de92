"""Roles of the ranks of a bundle: place on the mesh, weights, and cache."""

from __future__ import annotations

from typing import Any

from distir_relax.bundle import Manifest, local_bytes
from distir_relax.runtime.requests import bytes_per_token
from distir_relax.support.units import size


def rank_roles(manifest: Manifest) -> list[dict[str, Any]]:
    """Return a row for each rank: its index along each mesh axis of more than one device, weights, and cache."""
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
                "place": ", ".join(place) or "the whole model",
                "weights": size(weights),
                "cache_per_token": size(bytes_per_token(manifest, rank)),
            }
        )
    return rows
