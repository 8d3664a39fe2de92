"""Rows sent to the devices that have their groups, and back: what a dispatch and a combination are on devices.

A device that has rows of its own tokens sends each to the one that has its group. What it receives lies where the row
stands among all of those along the axis, zeros elsewhere: so shapes do not depend on data, and each device knows by the
groups of all rows which it sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ir import Attribute, DTensorType, Module, Op, TensorType, Value, mesh_kinds
from distir_relax.layout import R, Routed, Shard, held_intervals
from distir_relax.lowering.distributed_builder import PlacedEmitter, merge_attrs
from distir_relax.lowering.redistribute import Move
from distir_relax.ops import Routing, lookup
from distir_relax.ops.table import Localize
from distir_relax.sharding import Transition


def group_axes(op: Op) -> list[int]:
    """The mesh axes along which the groups of an op are split that has to do with rows of groups."""
    if lookup(op.name, op.location).split.routing is None:
        return []
    return [axis for axis, p in enumerate(op.operands[-1].dtensor.placements) if isinstance(p, Shard)]


def packs(module: Module) -> bool:
    """Whether rows that lie with their groups may be those alone that a device has, in a program of the sharded stage.

    A backend may keep them so, however many data say these are, where no op on the way is told of how many rows there
    are, and all come by an exchange along one axis, of rows that are a block on each device.
    """
    return all(_packs(op) for function in module.functions for op in function.ops if not op.callee)


def _packs(op: Op) -> bool:
    kinds = [v.dtensor for v in (*op.operands, *op.results)]
    if not any(isinstance(p, Routed) for kind in kinds for p in kind.placements):
        return True
    split = lookup(op.name, op.location).split
    if split.routing in (Routing.DISPATCH, Routing.COMBINE):
        lies, rows = (kinds[-1], kinds[0]) if split.routing is Routing.DISPATCH else (kinds[0], kinds[-1])
        pairs = list(zip(lies.placements, rows.placements, strict=True))
        moved = [b for a, b in pairs if isinstance(a, Routed)]
        (own,) = moved if len(moved) == 1 else (None,)
        others = sum(isinstance(b, Shard) and b.dim == 0 for _, b in pairs)
        return isinstance(own, Shard) and own.cut is not None and own.cut.is_block and others == 1
    return split.routing is not None or split.localize is None or _is_told_nothing(op, split.localize)


def _is_told_nothing(op: Op, localize: Localize) -> bool:
    """Whether the op's attributes are the same for another number of rows."""
    takes, gives = ([_with_more_rows(v.dtensor) for v in values] for values in (op.operands, op.results))
    told = localize(op.attrs, takes, gives)
    return all(told[key] == value for key, value in op.attrs.items())


def _with_more_rows(kind: DTensorType) -> TensorType:
    dims = {p.dim for p in kind.placements if isinstance(p, Routed)}
    return TensorType(tuple(n + 1 if d in dims else n for d, n in enumerate(kind.shape)), kind.dtype)


def lower_rows(emitter: PlacedEmitter, op: Op, operands: Sequence[Value], packed: bool) -> Value | None:
    """A dispatch or a combination, on local operands; None for another op. `packed` as `packs` says."""
    routing = lookup(op.name, op.location).split.routing
    if routing not in (Routing.DISPATCH, Routing.COMBINE):
        return None
    value, ids, groups = operands
    source, target = op.operands[0].dtensor, op.results[0].dtensor
    pairs = list(enumerate(zip(source.placements, target.placements, strict=True)))
    sent = [axis for axis, (a, b) in pairs if isinstance(a, Shard) and isinstance(b, Routed)]
    back = [axis for axis, (a, b) in pairs if isinstance(a, Routed) and isinstance(b, Shard)]
    if any(not isinstance(a, Routed) and not isinstance(b, Routed) for axis, (a, b) in pairs if axis in group_axes(op)):
        value = emitter.one(op.name, value, ids, groups)
    elif any(isinstance(a, Routed) and not isinstance(b, (Routed, Shard)) for _, (a, b) in pairs):
        # Of the rows that are there, those of other devices mean nothing: in a sum they are zero.
        value = emitter.one(op.name, value, ids, groups)
    emitter.hint = op.results[0].name
    for axis in sent:
        value = _send(emitter, "rows_to_groups", (value, ids), source, op.operands[2].dtensor, axis, packed=packed)
    for axis in back:
        value = _send(emitter, "rows_from_groups", (value, ids), target, op.operands[2].dtensor, axis)
    return value


def _send(
    emitter: PlacedEmitter,
    name: str,
    operands: tuple[Value, Value],
    rows: DTensorType,
    groups: DTensorType,
    axis: int,
    **more: Attribute,
) -> Value:
    """`rows` is how they lie with their tokens, `groups` how these do, both split along `axis`."""
    mesh, (value, ids), own = emitter.mesh, operands, rows.placements[axis]
    assert isinstance(own, Shard)
    move, step = Move(emitter, rows.shape, list(rows.placements)), Transition(axis, own, R)
    ids = move.to_device_order(ids, step, own)
    cutting = tuple(a for a, both in enumerate(zip(rows.placements, groups.placements, strict=True)) if _cuts(both))
    kinds = mesh_kinds(mesh, cutting)
    found: list[dict[str, Attribute]] = []
    for device in kinds.firsts:
        mine = list(mesh.coordinates(device))
        at = [[*mine[:axis], index, *mine[axis + 1 :]] for index in range(mesh.shape[axis])]
        sizes = [sum(b - a for a, b in held_intervals(rows.placements, 0, rows.shape[0], place)) for place in at]
        blocks = [held_intervals(groups.placements, 0, groups.shape[0], place) or [(0, 0)] for place in at]
        attrs: dict[str, Attribute] = {"sizes": tuple(sizes), "groups": tuple(block[0] for block in blocks)}
        if name == "rows_from_groups":
            attrs["size"] = sizes[mine[axis]]
        found.append(attrs)
    attrs = {"axis": mesh.axes[axis], **merge_attrs(found, kinds), **more}
    if name == "rows_from_groups":
        return emitter.one(name, move.to_device_order(value, step, own), ids, **attrs)
    return move.from_device_order(emitter.one(name, value, ids, **attrs), step, own)


def _cuts(both: tuple[object, object]) -> bool:
    return any(isinstance(p, Shard) for p in both)
