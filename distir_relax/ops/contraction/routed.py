"""Products of rows in any order, each with the matrix of its group: the experts of a mixture, without a sort.

``result[r] = x[r] @ w[g]`` where ``groups[g] == ids[r]``, and zero for a row of no group. `ids` numbers the group of
each row, `groups` numbers the matrices (`group_numbers`): a device that has some of them knows which. So rows are split
freely, each device with those of its own tokens, and where groups are split a device gives zeros for the rows of
others: the result is ``I[sum]``.

Where rows and groups are split along one mesh axis, each row is sent to the device that has its group, and its result
comes back: `dispatch_rows` and `combine_rows` stand before and behind what is computed there. Both give the rows of the
groups that a device has, and zeros for others: of all groups together, the rows as they are. Each is the other's
gradient. Between them rows lie as ``Routed[0]`` (`distir_relax.layout.placement`), which is a matter of layouts alone.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.contraction.matmul import transposed
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

# group_numbers: 0, 1, … as far as there are groups; a device has the numbers of its own


def _infer_numbers(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType((attrs["count"],), "int64"),)


def _numbers_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    (count,) = results[0].shape
    return Rule((Factor("group", count, PARALLEL),), (), (((0,),),)) if count > 1 else Rule((), (), (((),),))


def _own_numbers(x: Expansion) -> tuple[Value, ...]:
    return (x.emit("add", x.emit("group_numbers", count=x.held), x.start("int64")),)


define(
    "group_numbers",
    Semantics(infer=_infer_numbers, torch="torch.arange(0, {count})"),
    Split(_numbers_rule, expand={"group": _own_numbers}, positional=frozenset({"group"})),
    cost=FREE,
    code=Code(relax="R.arange(0, {count}, 1, 'int64')"),
)


# routed_matmul: result[r] = x[r] @ w[g] where groups[g] == ids[r]


def _check_numbers(ids: TensorType, groups: TensorType, rows: int) -> None:
    if ids.shape != (rows,) or len(groups.shape) != 1 or ids.dtype != "int64" or groups.dtype != "int64":
        raise ValueError(f"int64 numbers: of the group of each of {rows} rows, and of the groups")


def _infer_matmul(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, ids, groups = types
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError("rows, and a matrix for each group, of one dtype and fitting sizes")
    _check_numbers(ids, groups, x.shape[0])
    if groups.shape != w.shape[:1]:
        raise ValueError(f"the number of each of {w.shape[0]} groups")
    return (TensorType((x.shape[0], w.shape[2]), x.dtype),)


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    """Of rows that are routed evenly: a device works on those of its groups."""
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
        attributes={"count": "how many groups there are on all devices"},
    ),
    Split("row k, group k n, row, group -> row n", routing=Routing.WITHIN),
    cost=Cost(flops=_flops),
    # No op of Relax takes as many rows as data say: every group multiplies all rows, and keeps its own.
    code=Code(relax="routing.matmul({0}, {1}, {2}, {3})"),
    gradient=gradient_of(
        lambda b: b.emit("routed_matmul", b.grad, transposed(b.g, b.x(1)), b.x(2), b.x(3), **b.attrs),
        lambda b: b.emit("routed_weight_grad", b.x(0), b.grad, b.x(2), b.x(3), **b.attrs),
    ),
    traits={Trait.ZERO_IF_EMPTY},
)


# routed_weight_grad: result[g] = x[r].T @ y[r] over the rows r of group g


def _infer_weight_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, y, ids, groups = types
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0] or x.dtype != y.dtype:
        raise ValueError("two operands with the same rows and one dtype")
    _check_numbers(ids, groups, x.shape[0])
    return (TensorType((groups.shape[0], x.shape[1], y.shape[1]), x.dtype),)


define(
    "routed_weight_grad",
    Semantics(
        infer=_infer_weight_grad,
        torch="routing.weight_grad({0}, {1}, {2}, {3})",
        linear=(operands(0), operands(1)),
        attributes={"count": "how many groups there are on all devices"},
    ),
    Split("row k, row n, row, group -> group k n", routing=Routing.WITHIN),
    cost=Cost(flops=_flops),
    code=Code(relax="routing.weight_grad({0}, {1}, {2}, {3})"),
    gradient=gradient_of(
        lambda b: b.emit("routed_matmul", b.x(1), transposed(b.g, b.grad), b.x(2), b.x(3), **b.attrs),
        lambda b: b.emit("routed_matmul", b.x(0), b.grad, b.x(2), b.x(3), **b.attrs),
    ),
    traits={Trait.ZERO_IF_EMPTY},
)


# dispatch_rows, combine_rows: the rows of the groups that there are, zeros in the others


def _infer_rows(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, ids, groups = types
    if not x.shape:
        raise ValueError("rows")
    _check_numbers(ids, groups, x.shape[0])
    return (x,)


def _rows_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rest = " ".join(f"d{i}" for i in range(1, len(types[0].shape)))
    return parse_rule(f"row {rest}, row, group -> row {rest}", [t.shape for t in types], [results[0].shape])


def _back(other: str) -> Any:
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
        gradient=gradient_of(_back(_other)),
    )
