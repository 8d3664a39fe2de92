"""Grouped matrix products of rows sorted by group (mixture of experts), with one matrix per group.

``result[r] = x[r] @ w[g]`` for ``starts[g] <= r < ends[g]``, and zero for a row of no group. If the groups are split, a
device computes the rows of its own groups and zeros for all others: the result is ``I[sum]``. If the rows are split,
the bounds are shifted by the position of the device's first row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.contraction.matmul import transpose
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    Expansion,
    Order,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    define,
    gradient_of,
    operands,
)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, starts, ends = types
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError("expected rows, and a matrix for each group, of one dtype and fitting sizes")
    if not starts.shape == ends.shape == w.shape[:1] or "int" not in starts.dtype or starts.dtype != ends.dtype:
        raise ValueError(f"expected integers, the first row of each of {w.shape[0]} groups and the one after its last")
    return (TensorType((x.shape[0], w.shape[2]), x.dtype),)


def _split_rows(name: str) -> Callable[[Expansion], tuple[Value, ...]]:
    """Split the rows of op `name`, whose last two operands are the bounds of the groups."""

    def expand(x: Expansion) -> tuple[Value, ...]:
        data, other, *bounds = x.operands
        first = x.start(x.types[2].dtype)
        moved = [x.emit("subtract", bound, first) for bound in bounds]
        return (x.emit(name, data, other, *moved),)

    return expand


_SPANS = "zip({2}.clamp(0, {0}.shape[0]).tolist(), {3}.maximum({2}).clamp(0, {0}.shape[0]).tolist()"

define(
    "grouped_matmul",
    Semantics(
        infer=_infer,
        torch="{0}.new_zeros(({0}.shape[0], {1}.shape[2])).index_add_(0, "
        f"torch.cat([torch.arange(a, b, device={{0}}.device) for a, b in {_SPANS})]), "
        f"torch.cat([{{0}}[a:b] @ w for a, b, w in {_SPANS}, {{1}})]))",
        linear=(operands(0), operands(1)),
    ),
    Split(
        "row k, group k n, group, group -> row n",
        expand={"row": _split_rows("grouped_matmul")},
        positional=frozenset({"row"}),
        order=Order(by_number="routed_matmul"),
    ),
    cost=Cost(flops=lambda types, attrs, results: 2.0 * types[0].elements * types[1].shape[2]),
    code=Code(  # Relax has no op with data-dependent row counts: every group multiplies all rows and selects its own.
        relax="grouped_matmul({0}, {1}, {2}, {3})"
    ),
    gradient=gradient_of(
        lambda b: b.emit("grouped_matmul", b.grad, transpose(b.g, b.x(1)), b.x(2), b.x(3)),
        lambda b: b.emit("grouped_weight_grad", b.x(0), b.grad, b.x(2), b.x(3)),
    ),
    traits={Trait.ZERO_IF_EMPTY},
)


# grouped_weight_grad: result[g] = x[r].T @ y[r] over the rows r of group g


def _infer_weight_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, y, starts, ends = types
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0] or x.dtype != y.dtype:
        raise ValueError("expected two operands with the same rows and one dtype")
    if len(starts.shape) != 1 or starts != ends or "int" not in starts.dtype:
        raise ValueError("expected integers, the first row of each group and the one after its last")
    return (TensorType((starts.shape[0], x.shape[1], y.shape[1]), x.dtype),)


define(
    "grouped_weight_grad",
    Semantics(
        infer=_infer_weight_grad,
        torch="torch.cat([{0}.new_zeros((0, {0}.shape[1], {1}.shape[1])), "
        f"*[({{0}}[a:b].t() @ {{1}}[a:b])[None] for a, b in {_SPANS})]])",
        linear=(operands(0), operands(1)),
    ),
    Split(
        "row k, row n, group, group -> group k n",
        expand={"row": _split_rows("grouped_weight_grad")},
        positional=frozenset({"row"}),
    ),
    cost=Cost(flops=lambda types, attrs, results: 2.0 * types[0].elements * types[1].shape[1]),
    code=Code(relax="grouped_weight_grad({0}, {1}, {2}, {3})"),
    gradient=gradient_of(
        lambda b: b.emit("grouped_matmul", b.x(1), transpose(b.g, b.grad), b.x(2), b.x(3)),
        lambda b: b.emit("grouped_matmul", b.x(0), b.grad, b.x(2), b.x(3)),
    ),
    traits={Trait.ZERO_IF_EMPTY},
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
