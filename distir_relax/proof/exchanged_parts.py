"""Layouts of ops whose devices exchange parts of a second factor (`Split.ring`).

Together, devices along the axis have all of that factor; so the op is right as one of which each has all of it. What it
gives for the parts of a device by terms, on all devices, has been added up on that device.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ops.table import Held, Rule
from distir_relax.proof.local_ops import Instance, expanded_layouts
from distir_relax.proof.pieces import Groups, Layout, Mismatch, Tables


def held_by_index(
    tables: Tables, rule: Rule, layouts: Sequence[Layout], factor: str, groups: Groups, axis: int
) -> Held:
    """Return the elements of a factor that each index along an axis has, by the first operand with this factor.

    Raises `Mismatch` if there is none.
    """
    for layout, dims in zip(layouts, rule.operands, strict=True):
        for table, factors in zip(layout.dims, dims, strict=True):
            if [rule.factors[i].name for i in factors] == [factor]:
                return tuple(_intervals(tables, table, groups, axis, i) for i in range(groups.mesh.shape[axis]))
    raise Mismatch(f"no operand has the factor {factor}")


def layouts_after_turns(
    tables: Tables, instance: Instance, layouts: Sequence[Layout], claimed: Sequence[Layout], factor: str,
    groups: Groups, axis: int,
) -> list[Layout]:  # fmt: skip
    """Return the layouts of the results of an op whose devices along `axis` exchange their parts of a factor.

    Raises `Mismatch` if they do not have all of it, and as `expanded_layouts`.
    """
    rule = instance.rule
    kinds = [*instance.operands, *instance.results]
    joined, own = [], None
    for layout, dims, kind in zip([*layouts, *claimed], [*rule.operands, *rule.results], kinds, strict=True):
        tables_of_dims = list(layout.dims)
        for dim, factors in enumerate(dims):
            if [rule.factors[i].name for i in factors] == [factor]:
                own = layout.dims[dim] if own is None else own
                if layout.dims[dim] != own:
                    raise Mismatch(f"devices have other parts of {factor} in another operand")
                tables_of_dims[dim] = _all_of_group(tables, own, kind.shape[dim], groups, axis)
        joined.append(Layout(tuple(tables_of_dims), layout.pending, layout.fills, layout.zeros, layout.routed))
    count = len(layouts)
    found = expanded_layouts(tables, instance, joined[:count], groups, joined[count:])
    return [
        _returned(layout, before, axis) if before.dims != given.dims else layout
        for layout, before, given in zip(found, claimed, joined[count:], strict=True)
    ]


def _returned(layout: Layout, owned: Layout, axis: int) -> Layout:
    """Return the layout of terms that have been added up on the devices that own the parts."""
    if layout.pending[axis] != "sum":
        raise Mismatch("parts are returned that are no terms of a sum")
    pending = (*layout.pending[:axis], "", *layout.pending[axis + 1 :])
    return Layout(owned.dims, pending, layout.fills, layout.zeros, layout.routed)


def _all_of_group(tables: Tables, table: int, size: int, groups: Groups, axis: int) -> int:
    rows = tables.tables[table]
    for group in {tuple(rows[position] for position in group) for group in groups.along((axis,))}:
        ends = sorted(interval for row in group for interval in tables.intervals(row))
        if [0, *(stop for _, stop in ends)] != [*(start for start, _ in ends), size]:
            raise Mismatch("devices along the axis do not have each element once")
    return tables.full(size, len(rows))


def _intervals(tables: Tables, table: int, groups: Groups, axis: int, index: int) -> tuple[tuple[int, int], ...]:
    """Return the elements that devices of an index along an axis have, as intervals."""
    rows = {row for row, place in zip(tables.tables[table], groups.coordinates, strict=True) if place[axis] == index}
    found: list[tuple[int, int]] = []
    for start, stop in sorted(interval for row in rows for interval in tables.intervals(row)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)
