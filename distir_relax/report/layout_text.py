"""Layouts and names of values as tables show them: short, and what is alike once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distir_relax.ir import DTensorType
from distir_relax.layout import Cut, DeviceMesh, Placement, Shard, print_placements
from distir_relax.layout.partition import refine_cut

_MOST_SIZES = 8


def short(kind: DTensorType, mesh: DeviceMesh) -> str:
    """Placements of a tensor; sizes are told where they are not those of an even split, and the first of many."""
    return ", ".join(_placement(kind, axis, mesh) for axis in range(len(kind.placements)))


def pattern(name: str) -> str:
    """A name with a star for each number that stands by itself in it: ``layers.*.up.weight``, ``add_*``."""
    return re.sub(r"(?<![^%._])\d+(?![^._])", "*", name)


def named(names: Sequence[str]) -> str:
    """Names as one: itself, or their pattern and how many there are."""
    return names[0] if len(names) == 1 else f"{pattern(names[0])} x{len(names)}"


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by their patterns."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(pattern(name), []).append(name)
    return found


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
    """How ``S[dim]`` cuts a dim along an axis, within the parts that other axes before it make."""
    dim, others = kind.placements[axis], list[Cut]()
    assert isinstance(dim, Shard)
    before: Sequence[Placement] = kind.placements[:axis]
    for p in before:
        if isinstance(p, Shard) and p.dim == dim.dim and p.cut is not None:
            others.append(p.cut)
    return refine_cut(kind.shape[dim.dim], others, mesh.shape[axis])
