"""Roles of the ranks of a bundle: place on the mesh, weights, and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.bundle import Manifest, local_bytes
from distir_relax.runtime.requests import StateBytes
from distir_relax.support.units import size


def rank_roles(manifest: Manifest, idle: Sequence[Sequence[float]] = ((),)) -> list[dict[str, Any]]:
    """Return a row for each rank of each replica: its index along each mesh axis of several devices, weights, cache.

    `idle` has for each replica the share of the time in which its ranks are idle, or nothing.
    """
    mesh, bytes_of = manifest.mesh, StateBytes(manifest)
    rows = []
    for replica, shares in enumerate(idle):
        for rank in range(mesh.size):
            counted = [
                ("replica", replica, len(idle)),
                *zip(mesh.axes, mesh.coordinates(rank), mesh.shape, strict=True),
            ]
            place = [f"{name} {index + 1} of {count}" for name, index, count in counted if count > 1]
            rows.append(
                {
                    "rank": rank,
                    "place": ", ".join(place) or "the whole model",
                    "weights": size(sum(local_bytes(tensor, mesh, rank) for tensor in manifest.weights)),
                    "cache_per_token": size(bytes_of(rank, 1) - bytes_of(rank, 0)),
                    "idle": f"{shares[rank]:.0%}" if shares else "",
                }
            )
    return rows
