"""Short forms of layouts and value names for tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distir_relax.ir import DTensorType
from distir_relax.layout import Cut, DeviceMesh, Placement, Shard, print_placements
from distir_relax.layout.partition import refine_cut

_MOST_SIZES = 8


def short_layout(kind: DTensorType, mesh: DeviceMesh) -> str:
    """Print the placements of a tensor; sizes are omitted for even splits, and abbreviated for many shards."""
    return ", ".join(_placement(kind, axis, mesh) for axis in range(len(kind.placements)))


def pattern(name: str) -> str:
    """Replace the separate numbers in a name by stars: ``layers.*.up.weight``, ``add_*``."""
    return re.sub(r"(?<![^%._])\d+(?![^._])", "*", name)


def summarize_names(names: Sequence[str]) -> str:
    """Print names as one: the only name, or their pattern and number."""
    return names[0] if len(names) == 1 else f"{pattern(names[0])} x{len(names)}"


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their patterns."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    return groups


def _placement(kind: DTensorType, axis: int, mesh: DeviceMesh) -> str:
    placement = kind.placements[axis]
    if not isinstance(placement, Shard) or placement.cut is None:
        return print_placements((placement,))
    if placement.cut == _even(kind, axis, mesh):
        return f"S[{placement.dim}]"
    if placement.cut.ranks <= _MOST_SIZES:
        return str(placement)
    sizes = "|".join(str(n) for n in placement.cut.segments[0].sizes[:3])
    return f"S[{placement.dim}: {sizes}|...]"


def _even(kind: DTensorType, axis: int, mesh: DeviceMesh) -> Cut:
    """Return the cut of ``S[dim]`` along an axis, within the cuts of the axes before it."""
    shard, cuts = kind.placements[axis], list[Cut]()
    assert isinstance(shard, Shard)
    previous: Sequence[Placement] = kind.placements[:axis]
    for p in previous:
        if isinstance(p, Shard) and p.dim == shard.dim and p.cut is not None:
            cuts.append(p.cut)
    return refine_cut(kind.shape[shard.dim], cuts, mesh.shape[axis])
