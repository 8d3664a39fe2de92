"""Coordinate grids from vectors, with one dim per vector."""

from __future__ import annotations

from typing import Any

from distir_relax.ops.table import Attrs, Builder, aten, broadcast_to, relax, reshape_to

# ATen spellings


@aten("meshgrid.default", "meshgrid.indexing")
def _meshgrid(g: Builder, tensors: list[Any], *, indexing: str = "ij") -> Any:
    """With ``xy`` the first two dims of the results are swapped."""
    count = len(tensors)
    homes = list(range(count))
    if indexing == "xy" and count > 1:
        homes[:2] = [1, 0]
    shape = tuple(tensors[homes.index(d)].tensor.elements for d in range(count))
    return tuple(
        broadcast_to(g, reshape_to(g, x, tuple(n if d == home else 1 for d, n in enumerate(shape))), shape)
        for x, home in zip(tensors, homes, strict=True)
    )


# Relax spellings


@relax("relax.meshgrid")
def _relax_meshgrid(g: Builder, args: Any, attrs: Attrs) -> Any:
    return list(g.aten("meshgrid.indexing", args[0], indexing=attrs["indexing"] or "ij"))
