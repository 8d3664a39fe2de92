"""Products of rows that are sorted by group, each group with a matrix of its own: the experts of a mixture.

``result[r] = x[r] @ w[g]`` for ``starts[g] <= r < ends[g]``, and zero for a row of no group. Where the groups are
split, a device has those of its own, and zeros in all other rows: the result is ``I[sum]``. Where the rows are split,
the bounds move by what stands before the device's first row.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    Expansion,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    define,
    operands,
)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, starts, ends = types
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1] or x.dtype != w.dtype:
        raise ValueError("rows, and a matrix for each group, of one dtype and fitting sizes")
    if not starts.shape == ends.shape == w.shape[:1] or "int" not in starts.dtype or starts.dtype != ends.dtype:
        raise ValueError(f"integers, the first row of each of {w.shape[0]} groups and the one behind its last")
    return (TensorType((x.shape[0], w.shape[2]), x.dtype),)


def _split_rows(x: Expansion) -> tuple[Value, ...]:
    data, weights, *bounds = x.operands
    first = x.start(x.types[2].dtype)
    moved = [x.emit("subtract", bound, first) for bound in bounds]
    return (x.emit("grouped_matmul", data, weights, *moved),)


_SPANS = "zip({2}.clamp(0, {0}.shape[0]).tolist(), {3}.maximum({2}).clamp(0, {0}.shape[0]).tolist()"

define(
    "grouped_matmul",
    Semantics(
        infer=_infer,
        torch="{0}.new_zeros(({0}.shape[0], {1}.shape[2])).index_add(0, "
        f"torch.cat([torch.arange(a, b, device={{0}}.device) for a, b in {_SPANS})]), "
        f"torch.cat([{{0}}[a:b] @ w for a, b, w in {_SPANS}, {{1}})]))",
        linear=(operands(0), operands(1)),
    ),
    Split("row k, group k n, group, group -> row n", expand={"row": _split_rows}, positional=frozenset({"row"})),
    cost=Cost(flops=lambda types, attrs, results: 2.0 * types[0].elements * types[1].shape[2]),
    code=Code(  # No op of Relax takes as many rows as data say: every group multiplies all rows, and keeps its own.
        relax="grouped_matmul({0}, {1}, {2}, {3})"
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
