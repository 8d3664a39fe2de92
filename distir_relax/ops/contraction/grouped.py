"""Grouped matrix products (mixture of experts): each row is multiplied by the matrix of its group.

``result[r] = x[r] @ w[g]`` where ``starts[g] <= r < ends[g]`` for rows sorted by group (``grouped_matmul``), and where
``groups[g] == ids[r]`` for rows in any order (``routed_matmul``). A row of no group is zero. If the
groups are split, a device computes the rows of its own groups and zeros for all others: the result is ``I[sum]``. If
sorted rows are split, the bounds are shifted by the position of the device's first row. Rows in any order are split
freely, each device with its own tokens: `ids` gives the group of each row, `groups` the group of each matrix
(`group_numbers`), so a device knows the groups of its matrices.

If rows and groups are split along one mesh axis, each row is sent to the device that owns its group, and its result is
sent back: `dispatch_rows` and `combine_rows` enclose the computation. Both return the rows of the groups that a device
owns, and zeros for others; on all groups they are the identity. Each is the other's gradient. Between them rows are
placed as ``Routed[0]`` (`distir_relax.layout.placement`), which only affects layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops.contraction.matmul import transpose
from distir_relax.ops.table import (
    FREE,
    PARALLEL,
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Expansion,
    Factor,
    Gradient,
    Order,
    QuantizedForm,
    Routing,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    define,
    gradient_of,
    operands,
    parse_rule,
)
from distir_relax.ops.table.entry import Infer

Check = Callable[[int, int, TensorType, TensorType], None]
"""Raises ValueError unless the last two operands describe groups, given the numbers of rows and of groups."""


def _infer_matmul(check: Check) -> Infer:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x, w, *groups = types
        if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
            raise ValueError("expected rows, and a matrix for each group, of one dtype and fitting sizes")
        check(x.shape[0], w.shape[0], *groups)
        return (TensorType((x.shape[0], w.shape[2]), x.dtype),)

    return infer


def _infer_weight_grad(check: Check) -> Infer:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x, y, *groups = types
        if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0] or x.dtype != y.dtype:
            raise ValueError("expected two operands with the same rows and one dtype")
        count = groups[1].elements
        check(x.shape[0], count, *groups)
        return (TensorType((count, x.shape[1], y.shape[1]), x.dtype),)

    return infer


def _gradients(kind: str) -> tuple[Gradient, Gradient]:
    """Return the gradients of ``{kind}_matmul`` and of ``{kind}_weight_grad``, which are products of the same kind."""

    def product(b: Backward, op: str, left: Value, right: Value) -> Value:
        return b.emit(f"{kind}_{op}", left, right, b.x(2), b.x(3), **b.attrs)  # type: ignore[no-any-return]

    of_matmul = gradient_of(
        lambda b: product(b, "matmul", b.grad, transpose(b.g, b.x(1))),
        lambda b: product(b, "weight_grad", b.x(0), b.grad),
    )
    of_weight_grad = gradient_of(
        lambda b: product(b, "matmul", b.x(1), transpose(b.g, b.grad)),
        lambda b: product(b, "matmul", b.x(0), b.grad),
    )
    return of_matmul, of_weight_grad


def _quantized_product(g: Builder, op: Op, weight: Sequence[Value]) -> Value:
    x, _, *groups = op.operands
    result: Value = g.emit(f"quantized_{op.name}", x, *weight, *groups, **op.attrs)
    return result


_quantized_form = QuantizedForm(1, _quantized_product, is_transposed=True)

# grouped_matmul, grouped_weight_grad: rows sorted by group. result[g] = x[r].T @ y[r] over the rows r of group g


def check_bounds(rows: int, count: int, starts: TensorType, ends: TensorType) -> None:
    """Raise ValueError unless the types are those of the bounds of so many groups."""
    if starts != ends or ends.shape != (count,) or "int" not in starts.dtype:
        raise ValueError(f"expected integers, the first row of each of {count} groups and the one after its last")


def _local_rows(types: Types, attrs: Attrs) -> float:
    """Return the rows that a device computes under uniform routing: those of its groups."""
    groups = types[-1].shape[0]
    return types[0].shape[0] * groups / max(1, int(attrs.get("count", groups)))


def _groups_in_use(types: Types, attrs: Attrs) -> float:
    """Return the expected number of a device's groups that have rows, under uniform routing."""
    groups = types[-1].shape[0]
    count = max(1, int(attrs.get("count", groups)))
    return float(groups * (1.0 - (1.0 - 1.0 / count) ** types[0].shape[0]))


def _flops(types: Types, attrs: Attrs, results: Types) -> float:
    return 2.0 * _local_rows(types, attrs) * types[0].shape[-1] * results[0].shape[-1]


def _product(types: Types, attrs: Attrs, results: Types) -> tuple[int, int, int, int]:
    batch = max(1, round(_groups_in_use(types, attrs)))
    return batch, math.ceil(_local_rows(types, attrs) / batch), results[0].shape[-1], types[0].shape[-1]


def _moved(types: Types, attrs: Attrs, results: Types) -> float:
    """Return the bytes read and written: of the matrices, those of groups that have rows."""
    x, *matrices, ids, groups = types
    share = _groups_in_use(types, attrs) / max(1, groups.shape[0])
    return sum(t.bytes for t in (x, ids, groups, *results)) + share * sum(t.bytes for t in matrices)


PRODUCT_COST = Cost(flops=_flops, product=_product, moved=_moved)
"""Cost of products of rows with the matrices of their groups, under uniform routing."""


def split_rows(name: str) -> Callable[[Expansion], tuple[Value, ...]]:
    """Split the rows of op `name`, whose last two operands are the bounds of the groups."""

    def expand(x: Expansion) -> tuple[Value, ...]:
        *others, starts, ends = x.operands
        first = x.start(x.types[-1].dtype)
        shifted = [x.emit("subtract", bound, first) for bound in (starts, ends)]
        return (x.emit(name, *others, *shifted),)

    return expand


_of_matmul, _of_weight_grad = _gradients("grouped")

define(
    "grouped_matmul",
    Semantics(
        infer=_infer_matmul(check_bounds),
        torch="routing.sorted_matmul({0}, {1}, {2}, {3})",
        linear=(operands(0), operands(1)),
    ),
    Split(
        "row k, group k n, group, group -> row n",
        expand={"row": split_rows("grouped_matmul")},
        positional=frozenset({"row"}),
        order=Order(by_number="routed_matmul"),
    ),
    cost=PRODUCT_COST,
    # Relax has no op with data-dependent row counts: every group multiplies all rows and selects its own.
    code=Code(relax="grouped_matmul({0}, {1}, {2}, {3})"),
    gradient=_of_matmul,
    quantized=_quantized_form,
    traits={Trait.ZERO_IF_EMPTY},
)
define(
    "grouped_weight_grad",
    Semantics(
        infer=_infer_weight_grad(check_bounds),
        torch="routing.sorted_weight_grad({0}, {1}, {2}, {3})",
        linear=(operands(0), operands(1)),
    ),
    Split(
        "row k, row n, group, group -> group k n",
        expand={"row": split_rows("grouped_weight_grad")},
        positional=frozenset({"row"}),
    ),
    cost=Cost(flops=_flops),
    code=Code(relax="grouped_weight_grad({0}, {1}, {2}, {3})"),
    gradient=_of_weight_grad,
    traits={Trait.ZERO_IF_EMPTY},
)


# routed_matmul, routed_weight_grad: the same for rows in any order


def check_ids(rows: int, count: int, ids: TensorType, groups: TensorType) -> None:
    """Raise ValueError unless the types are those of the ids of so many rows and groups."""
    if ids != TensorType((rows,), "int64") or groups != TensorType((count,), "int64"):
        raise ValueError(f"expected int64 ids of the group of each of {rows} rows, and of {count} groups")


for (_name, _infer, _code, _rule, _cost, _form), _gradient in zip(
    (
        ("routed_matmul", _infer_matmul, "routing.matmul", "row k, group k n, row, group -> row n",
         PRODUCT_COST, _quantized_form),
        ("routed_weight_grad", _infer_weight_grad, "routing.weight_grad", "row k, row n, row, group -> group k n",
         Cost(flops=_flops), None),
    ),
    _gradients("routed"),
    strict=True,
):  # fmt: skip
    define(
        _name,
        Semantics(
            infer=_infer(check_ids),
            torch=f"{_code}({{0}}, {{1}}, {{2}}, {{3}})",
            linear=(operands(0), operands(1)),
            attributes={"count": "the number of groups on all devices"},
        ),
        Split(_rule, routing=Routing.WITHIN),
        cost=_cost,
        code=Code(relax=f"{_code}({{0}}, {{1}}, {{2}}, {{3}})"),
        gradient=_gradient,
        quantized=_form,
        traits={Trait.ZERO_IF_EMPTY},
    )


# group_numbers: 0, 1, … for all groups; a device has the numbers of its own groups


def _numbers_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    (count,) = results[0].shape
    return Rule((Factor("group", count, PARALLEL),), (), (((0,),),)) if count > 1 else Rule((), (), (((),),))


def _split_numbers(x: Expansion) -> tuple[Value, ...]:
    return (x.emit("add", x.emit("group_numbers", count=x.local_size), x.start("int64")),)


define(
    "group_numbers",
    Semantics(
        infer=lambda types, attrs: (TensorType((attrs["count"],), "int64"),),
        torch="torch.arange(0, {count}, device=comm.device)",
    ),
    Split(_numbers_rule, expand={"group": _split_numbers}, positional=frozenset({"group"})),
    cost=FREE,
    code=Code(relax="R.arange(0, {count}, 1, 'int64')"),
)


# dispatch_rows, combine_rows: the rows of the owned groups, zeros elsewhere


def _infer_rows(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, ids, groups = types
    if not x.shape:
        raise ValueError("expected rows, found a scalar")
    check_ids(x.shape[0], groups.elements, ids, groups)
    return (x,)


def _rows_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rest = " ".join(f"d{i}" for i in range(1, len(types[0].shape)))
    return parse_rule(f"row {rest}, row, group -> row {rest}", [t.shape for t in types], [results[0].shape])


def _adjoint(other: str) -> Any:
    return lambda b: b.emit(other, b.grad, b.x(1), b.x(2))


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


# ATen spellings


@aten("transformers.grouped_mm_fallback.default", "_grouped_mm.default")
def _grouped_mm(
    g: Builder, x: Value, weights: Value, ends: Value | None = None, bias: Any = None, dtype: Any = None
) -> Any:
    if ends is None or bias is not None or dtype is not None or len(weights.tensor.shape) != 3:
        raise NotImplementedError("a grouped product other than of sorted rows with a matrix for each group")
    before = g.emit("strided_slice", ends, axes=(0,), begin=(0,), end=(ends.tensor.elements - 1,), strides=(1,))
    first = g.emit("broadcast_to", g.constant(0, ends.tensor.dtype), shape=(1,))
    return g.emit("grouped_matmul", x, weights, g.emit("concat", first, before, axis=0), ends)
