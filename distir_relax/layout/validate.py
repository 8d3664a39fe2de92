"""Validation and normalization of placements for a mesh and a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from distir_relax.errors import PlacementError
from distir_relax.layout.mesh import DeviceMesh
from distir_relax.layout.partition import reject_crossing
from distir_relax.layout.placement import At, Placement, Routed, Shard, parse_placements
from distir_relax.layout.symbolic_size import Symbol, is_always, is_symbolic, symbols_of


def validate_placements(
    placement: object, mesh: DeviceMesh, shape: tuple[int, ...], where: str = ""
) -> tuple[Placement, ...]:
    """Return normalized placements, checked against `mesh` and `shape`; negative dims become positive.

    `placement` is text, a placement of ours or torch's, or a list of those. Raises `PlacementError` for text that is
    not a placement, a number of placements other than that of mesh axes, a dim out of range, sizes that do not add up
    to their dim, and cuts of one dim along two axes that are not nested.
    """
    items = placement if isinstance(placement, (list, tuple)) else [placement]
    try:
        if symbols := frozenset().union(*map(symbols_of, shape)):
            return _fit(", ".join(map(str, items)), mesh, shape, tuple(symbols))
        return _fit(", ".join(map(str, items)), mesh, shape)
    except PlacementError as error:
        raise PlacementError(error.message, where, error.hint) from None


def validate_annotation(
    placement: object, mesh: DeviceMesh, shape: tuple[int, ...], where: str = ""
) -> tuple[Placement, ...]:
    """As `validate_placements`, for an annotation in a model.

    Also raises `PlacementError` for ``At[i]`` and ``Routed[dim]``, which annotations cannot request.
    """
    fitted = validate_placements(placement, mesh, shape, where)
    if any(isinstance(p, Routed) for p in fitted):
        raise PlacementError(
            "an annotation cannot request Routed: dispatch ops place rows with their experts",
            where,
            "mark the experts S[0] along the axis",
        )
    if away := [p for p in fitted if isinstance(p, At)]:
        raise PlacementError(
            f"{away[0]} keeps a tensor on one pipeline stage, which an annotation in a model cannot request",
            where,
            "mark it R or S[dim]; docs/simulator.md describes programs with stages",
        )
    return fitted


def find_problem(placements: Sequence[Placement], mesh: DeviceMesh, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """Return the problem of placements for a tensor on a mesh, and a hint; None if they are valid."""
    if len(placements) != len(mesh.shape):
        axes, listed = ", ".join(mesh.axes), ", ".join(map(str, placements))
        return (
            f"expected one placement for each of the {len(mesh.shape)} mesh axes ({axes}), "
            f"found {len(placements)} in {listed!r}",
            'separate them by commas: "S[0], R"',
        )
    for placement, ranks, name in zip(placements, mesh.shape, mesh.axes, strict=True):
        if isinstance(placement, At) and placement.index >= ranks:
            return f"axis {name} of {mesh} has no index {placement.index}", ""
        if isinstance(placement, Shard) and (problem := _shard_problem(placement, ranks, shape)):
            return problem, ""
        if isinstance(placement, Routed) and placement.dim >= len(shape):
            return f"{placement} names dim {placement.dim} of a tensor of shape {shape}", ""
    return None


def _shard_problem(shard: Shard, ranks: int, shape: tuple[int, ...]) -> str:
    if not -len(shape) <= shard.dim < len(shape):
        dims = f"dims 0 to {len(shape) - 1}" if shape else "no dims"
        return f"{shard} names dim {shard.dim}, but a tensor of shape {shape} has {dims}"
    cut, size = shard.cut, shape[shard.dim]
    if cut and cut.ranks != ranks:
        return f"{shard} lists {cut.ranks} sizes, but the mesh axis has {ranks} devices"
    if shard.shares and len(shard.shares) != ranks:
        return f"{shard} lists {len(shard.shares)} shares, but the mesh axis has {ranks} devices"
    if cut and (is_always(cut.total, "==", size) is False or is_symbolic(cut.total) != is_symbolic(size)):
        dim = shard.dim % len(shape)
        return f"the sizes of {shard} add up to {cut.total}, but dim {dim} of shape {shape} has {size}"
    return ""


@lru_cache(maxsize=4096)
def _fit(
    text: str, mesh: DeviceMesh, shape: tuple[int, ...], symbols: tuple[Symbol, ...] = ()
) -> tuple[Placement, ...]:
    placements = parse_placements(text, symbols)
    if problem := find_problem(placements, mesh, shape):
        raise PlacementError(problem[0], hint=problem[1])
    fitted = tuple(replace(p, dim=p.dim % len(shape)) if isinstance(p, Shard) else p for p in placements)
    reject_crossing(fitted, "")
    return fitted
