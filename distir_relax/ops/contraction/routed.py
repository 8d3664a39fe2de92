"""Routed matrix products of unsorted rows (mixture of experts), each with the matrix of its group.

``result[r] = x[r] @ w[g]`` where ``groups[g] == ids[r]``, and zero for a row of no group. `ids` gives the group of
each row, `groups` the group of each matrix (`group_numbers`), so a device knows the groups of its matrices. So rows are
split freely, each device with its own tokens; if groups are split, a device computes zeros for rows of other groups:
the result is ``I[sum]``.

If rows and groups are split along one mesh axis, each row is sent to the device that owns its group, and its result is
sent back: `dispatch_rows` and `combine_rows` enclose the computation. Both return the rows of the groups that a device
owns, and zeros for others; on all groups they are the identity. Each is the other's gradient. Between them rows are
placed as ``Routed[0]`` (`distir_relax.layout.placement`), which only affects layouts.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.contraction.matmul import transpose
from distir_relax.ops.table import (
    FREE,
    PARALLEL,
    Attrs,
    Backward,
    Code,
    Cost,
    Expansion,
    Factor,
    Routing,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    define,
    gradient_of,
    operands,
    parse_rule,
)

# group_numbers: 0, 1, … for all groups; a device has the numbers of its own groups


def _infer_numbers(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType((attrs["count"],), "int64"),)


def _numbers_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    (count,) = results[0].shape
    return Rule((Factor("group", count, PARALLEL),), (), (((0,),),)) if count > 1 else Rule((), (), (((),),))


def _split_numbers(x: Expansion) -> tuple[Value, ...]:
    return (x.emit("add", x.emit("group_numbers", count=x.local_size), x.start("int64")),)


define(
    "group_numbers",
    Semantics(infer=_infer_numbers, torch="torch.arange(0, {count})"),
    Split(_numbers_rule, expand={"group": _split_numbers}, positional=frozenset({"group"})),
    cost=FREE,
    code=Code(relax="R.arange(0, {count}, 1, 'int64')"),
)


# routed_matmul: result[r] = x[r] @ w[g] where groups[g] == ids[r]


def _check_numbers(ids: TensorType, groups: TensorType, rows: int) -> None:
    if ids.shape != (rows,) or len(groups.shape) != 1 or ids.dtype != "int64" or groups.dtype != "int64":
        raise ValueError(f"expected int64 ids of the group of each of {rows} rows, and of the groups")


def _infer_matmul(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, ids, groups = types
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError("expected rows, and a matrix for each group, of one dtype and fitting sizes")
    _check_numbers(ids, groups, x.shape[0])
    if groups.shape != w.shape[:1]:
        raise ValueError(f"expected the ids of {w.shape[0]} groups")
    return (TensorType((x.shape[0], w.shape[2]), x.dtype),)


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    """Flops under uniform routing: a device computes the rows of its groups."""
    groups = types[3].shape[0]
    columns = (results[0] if len(types[1].shape) == 3 else types[1]).shape[-1]
    share = groups / max(1, int(attrs["count"]))
    return 2.0 * types[0].elements * columns * share


define(
    "routed_matmul",
    Semantics(
        infer=_infer_matmul,
        torch="routing.matmul({0}, {1}, {2}, {3})",
        linear=(operands(0), operands(1)),
        attributes={"count": "the number of groups on all devices"},
    ),
    Split("row k, group k n, row, group -> row n", routing=Routing.WITHIN),
    cost=Cost(flops=_flops),
    # Relax has no op with data-dependent row counts: every group multiplies all rows and selects its own.
    code=Code(relax="routing.matmul({0}, {1}, {2}, {3})"),
    gradient=gradient_of(
        lambda b: b.emit("routed_matmul", b.grad, transpose(b.g, b.x(1)), b.x(2), b.x(3), **b.attrs),
        lambda b: b.emit("routed_weight_grad", b.x(0), b.grad, b.x(2), b.x(3), **b.attrs),
    ),
    traits={Trait.ZERO_IF_EMPTY},
)


# routed_weight_grad: result[g] = x[r].T @ y[r] over the rows r of group g


def _infer_weight_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, y, ids, groups = types
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0] or x.dtype != y.dtype:
        raise ValueError("expected two operands with the same rows and one dtype")
    _check_numbers(ids, groups, x.shape[0])
    return (TensorType((groups.shape[0], x.shape[1], y.shape[1]), x.dtype),)


define(
    "routed_weight_grad",
    Semantics(
        infer=_infer_weight_grad,
        torch="routing.weight_grad({0}, {1}, {2}, {3})",
        linear=(operands(0), operands(1)),
        attributes={"count": "the number of groups on all devices"},
    ),
    Split("row k, row n, row, group -> group k n", routing=Routing.WITHIN),
    cost=Cost(flops=_flops),
    code=Code(relax="routing.weight_grad({0}, {1}, {2}, {3})"),
    gradient=gradient_of(
        lambda b: b.emit("routed_matmul", b.x(1), transpose(b.g, b.grad), b.x(2), b.x(3), **b.attrs),
        lambda b: b.emit("routed_matmul", b.x(0), b.grad, b.x(2), b.x(3), **b.attrs),
    ),
    traits={Trait.ZERO_IF_EMPTY},
)


# dispatch_rows, combine_rows: the rows of the owned groups, zeros elsewhere


def _infer_rows(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, ids, groups = types
    if not x.shape:
        raise ValueError("expected rows, found a scalar")
    _check_numbers(ids, groups, x.shape[0])
    return (x,)


def _rows_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rest = " ".join(f"d{i}" for i in range(1, len(types[0].shape)))
    return parse_rule(f"row {rest}, row, group -> row {rest}", [t.shape for t in types], [results[0].shape])


def _adjoint(other: str) -> Any:
    def write(b: Backward) -> Value:
        sent: Value = b.emit(other, b.grad, b.x(1), b.x(2))
        return sent

    return write


for _name, _other, _routing in (
    ("dispatch_rows", "combine_rows", Routing.DISPATCH),
    ("combine_rows", "dispatch_rows", Routing.COMBINE),
):
    define(
        _name,
        Semantics(infer=_infer_rows, torch="routing.selected({0}, {1}, {2})", linear=(operands(0),)),
        Split(_rows_rule, routing=_routing),
        cost=FREE,
        code=Code(relax="routing.selected({0}, {1}, {2})"),
        gradient=gradient_of(_adjoint(_other)),
    )
