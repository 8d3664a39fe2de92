"""Token dispatch: rows sent along a mesh axis to the devices that own their groups, and back. Counts depend on data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.kernels import routing
from distir_relax.layout import Collective
from distir_relax.ops.communication.collectives import AXIS, SIZE
from distir_relax.ops.table import Attrs, Cost, Routing, Semantics, Split, Trait, Types, define, no_flops, resized
from distir_relax.ops.table.rule import no_rule

_SIZES = "the number of rows of each index along the axis"
_GROUPS = "the groups of each index: the first, and the one after the last"


def _check(types: Types, attrs: Attrs) -> None:
    if types[1].shape != (sum(attrs["sizes"]),) or len(attrs["sizes"]) != len(attrs["groups"]):
        raise ValueError(
            f"expected the group id of each of {sum(attrs['sizes'])} rows, and a range of groups for each device"
        )


def _infer_to(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _check(types, attrs)
    return (resized(types[0], 0, sum(attrs["sizes"])),)


def _infer_from(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _check(types, attrs)
    if types[0].shape[0] != sum(attrs["sizes"]):
        raise ValueError(f"expected {sum(attrs['sizes'])} rows, found {types[0]}")
    return (resized(types[0], 0, attrs["size"]),)


def _dispatch(parts: Sequence[Any], attrs: Attrs) -> list[Any]:
    """Send each row to the device that owns its group; zeros on all others."""
    import torch

    rows = torch.cat([part for part, _ in parts])
    if rows.is_meta:
        return [rows for _ in parts]
    owners = [routing.owners(ids, attrs["groups"]) for _, ids in parts]
    masks = [(owner == i).view(-1, *(1,) * (rows.dim() - 1)) for i, owner in enumerate(owners)]
    return [torch.where(mask, rows, rows.new_zeros(())) for mask in masks]


def _combine(parts: Sequence[Any], attrs: Attrs) -> list[Any]:
    """Return each row from the device that owns its group; zeros for a row that no device owns."""
    result = parts[0][0].new_zeros(parts[0][0].shape)
    if not result.is_meta:
        for i, (rows, ids) in enumerate(parts):
            mine = routing.owners(ids, attrs["groups"]) == i
            result[mine] = rows[mine]
    return list(result.split(attrs["sizes"]))


def _dispatch_pieces(attrs: Attrs, index: int) -> list[int]:
    """Return the number of rows sent to each device under uniform routing: proportional to its groups."""
    return [stop - start for start, stop in attrs["groups"]]


def _combine_pieces(attrs: Attrs, index: int) -> list[int]:
    """Return the number of rows sent back: only rows of a device's own groups."""
    counts = _dispatch_pieces(attrs, index)
    moved = [rows * counts[index] for rows in attrs["sizes"]]
    moved[index] += sum(attrs["sizes"]) * (max(1, sum(counts)) - counts[index])
    return moved


define(
    "rows_to_groups",
    Semantics(
        infer=_infer_to,
        # A torch rank may hold fewer rows than the type: only those of its groups.
        torch="comm.rows_to_groups({0}, {1}, {axis}, {sizes}, {groups}, step={step}, alone={packed})",
        attributes={
            "axis": AXIS,
            "sizes": _SIZES,
            "groups": _GROUPS,
            "packed": "whether a rank may store only the rows of its groups",
        },
        collective_semantics=_dispatch,
    ),
    Split(no_rule, routing=Routing.DISPATCH),
    cost=Cost(flops=no_flops, collective=Collective.ALL_TO_ALL, pieces=_dispatch_pieces),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
define(
    "rows_from_groups",
    Semantics(
        infer=_infer_from,
        torch="comm.rows_from_groups({0}, {1}, {axis}, {sizes}, {groups}, step={step})",
        attributes={"axis": AXIS, "sizes": _SIZES, "groups": _GROUPS, "size": SIZE},
        collective_semantics=_combine,
        per_device_attrs=frozenset({"size"}),
    ),
    Split(no_rule, routing=Routing.COMBINE),
    cost=Cost(flops=no_flops, collective=Collective.ALL_TO_ALL, pieces=_combine_pieces, brings_as_gets=True),
    traits={Trait.ON_COMMUNICATOR, Trait.COMMUNICATES},
)
