"""Expert dispatch: rows are sent to the devices of their groups (experts), and back.

A device sends each row of its own tokens to the device of the row's group. Received rows are stored at their global
positions along the axis, with zeros elsewhere. So shapes do not depend on data, and each device derives all sends and
receives from the groups of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from distir_relax.ir import Attribute, DTensorType, Module, Op, TensorType, Value, mesh_classes
from distir_relax.layout import R, Routed, Shard, local_intervals
from distir_relax.lowering.distributed_builder import SpmdBuilder, merge_attrs
from distir_relax.lowering.redistribute import ReshardState
from distir_relax.ops import Routing, lookup
from distir_relax.ops.table import Localize
from distir_relax.sharding import Transition


def group_axes(op: Op) -> list[int]:
    """Return the mesh axes along which the groups of a routing op are split; empty for other ops."""
    if lookup(op.name, op.location).split.routing is None:
        return []
    return [axis for axis, p in enumerate(op.operands[-1].dtensor.placements) if isinstance(p, Shard)]


def can_pack(module: Module) -> bool:
    """Whether devices can store only their own routed rows compactly, in a program of the sharded stage.

    A backend may do so, with data-dependent sizes, if no op on the way has attributes that depend on the number of
    rows, and all routed rows are exchanged along one axis, from one block per device.
    """
    return all(_can_pack(op) for function in module.functions for op in function.ops if not op.callee)


def _can_pack(op: Op) -> bool:
    kinds = [v.dtensor for v in (*op.operands, *op.results)]
    if not any(isinstance(p, Routed) for kind in kinds for p in kind.placements):
        return True
    split = lookup(op.name, op.location).split
    if split.routing in (Routing.DISPATCH, Routing.COMBINE):
        routed, rows = (kinds[-1], kinds[0]) if split.routing is Routing.DISPATCH else (kinds[0], kinds[-1])
        pairs = list(zip(routed.placements, rows.placements, strict=True))
        row_placements = [b for a, b in pairs if isinstance(a, Routed)]
        (shard,) = row_placements if len(row_placements) == 1 else (None,)
        others = sum(isinstance(b, Shard) and b.dim == 0 for _, b in pairs)
        return isinstance(shard, Shard) and shard.cut is not None and shard.cut.is_block and others == 1
    return split.routing is not None or split.localize is None or _ignores_row_count(op, split.localize)


def _ignores_row_count(op: Op, localize: Localize) -> bool:
    """Whether the op's attributes do not depend on the number of rows."""
    operand_types, result_types = ([_with_more_rows(v.dtensor) for v in values] for values in (op.operands, op.results))
    local_attrs = localize(op.attrs, operand_types, result_types)
    return all(local_attrs[key] == value for key, value in op.attrs.items())


def _with_more_rows(kind: DTensorType) -> TensorType:
    dims = {p.dim for p in kind.placements if isinstance(p, Routed)}
    return TensorType(tuple(n + 1 if d in dims else n for d, n in enumerate(kind.shape)), kind.dtype)


def lower_dispatch(builder: SpmdBuilder, op: Op, operands: Sequence[Value], packed: bool) -> Value | None:
    """Lower a dispatch or combine op on local operands; None for other ops. `packed` is the result of `can_pack`."""
    routing = lookup(op.name, op.location).split.routing
    if routing not in (Routing.DISPATCH, Routing.COMBINE):
        return None
    value, ids, groups = operands
    source, target = op.operands[0].dtensor, op.results[0].dtensor
    pairs = list(enumerate(zip(source.placements, target.placements, strict=True)))
    sent = [axis for axis, (a, b) in pairs if isinstance(a, Shard) and isinstance(b, Routed)]
    back = [axis for axis, (a, b) in pairs if isinstance(a, Routed) and isinstance(b, Shard)]
    if any(not isinstance(a, Routed) and not isinstance(b, Routed) for axis, (a, b) in pairs if axis in group_axes(op)):
        value = builder.one(op.name, value, ids, groups)
    elif any(isinstance(a, Routed) and not isinstance(b, (Routed, Shard)) for _, (a, b) in pairs):
        # Rows of other groups are undefined: they must be zero in a sum.
        value = builder.one(op.name, value, ids, groups)
    builder.hint = op.results[0].name
    for axis in sent:
        value = _exchange(builder, "rows_to_groups", (value, ids), source, op.operands[2].dtensor, axis, packed=packed)
    for axis in back:
        value = _exchange(builder, "rows_from_groups", (value, ids), target, op.operands[2].dtensor, axis)
    return value


def _exchange(
    builder: SpmdBuilder,
    name: str,
    operands: tuple[Value, Value],
    rows: DTensorType,
    groups: DTensorType,
    axis: int,
    **more: Attribute,
) -> Value:
    """Emit an exchange; `rows` is the layout of rows with their tokens, `groups` of groups, both split along `axis`."""
    mesh, (value, ids), shard = builder.mesh, operands, rows.placements[axis]
    assert isinstance(shard, Shard)
    state, step = ReshardState(builder, rows.shape, list(rows.placements)), Transition(axis, shard, R)
    ids = state.to_device_order(ids, step, shard)
    split_axes = tuple(a for a, pair in enumerate(zip(rows.placements, groups.placements, strict=True)) if _cuts(pair))
    classes = mesh_classes(mesh, split_axes)
    attrs_of_class: list[dict[str, Attribute]] = []
    for device in classes.firsts:
        coordinates = list(mesh.coordinates(device))
        peers = [[*coordinates[:axis], index, *coordinates[axis + 1 :]] for index in range(mesh.shape[axis])]
        sizes = [sum(b - a for a, b in local_intervals(rows.placements, 0, rows.shape[0], c)) for c in peers]
        blocks = [local_intervals(groups.placements, 0, groups.shape[0], c) or [(0, 0)] for c in peers]
        attrs: dict[str, Attribute] = {"sizes": tuple(sizes), "groups": tuple(block[0] for block in blocks)}
        if name == "rows_from_groups":
            attrs["size"] = sizes[coordinates[axis]]
        attrs_of_class.append(attrs)
    attrs = {"axis": mesh.axes[axis], **merge_attrs(attrs_of_class, classes), **more}
    if name == "rows_from_groups":
        return builder.one(name, state.to_device_order(value, step, shard), ids, **attrs)
    return state.from_device_order(builder.one(name, value, ids, **attrs), step, shard)


def _cuts(both: tuple[object, object]) -> bool:
    return any(isinstance(p, Shard) for p in both)
