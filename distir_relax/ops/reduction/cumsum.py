"""Cumulative sums."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.reduction.reduction_axes import axes_of, converted, infer_along_axis, unsplit_axis_rule
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    OnnxOperands,
    Semantics,
    Split,
    aten,
    cast,
    define,
    gradient_of,
    onnx,
    operands,
    relax,
)


def reverse_cumsum(b: Backward, x: Value) -> Value:
    """Return the reversed cumulative sum of `x` along the op's axis."""
    axis = b.attrs["axis"]
    total: Value = b.emit("flip", b.emit("cumsum", b.emit("flip", x, axis=axis), axis=axis), axis=axis)
    return total


define(
    "cumsum",
    Semantics(infer=infer_along_axis, torch="torch.cumsum({0}, {axis}, dtype={0}.dtype)", linear=(operands(0),)),
    Split(unsplit_axis_rule),
    code=Code(relax="R.cumsum({0}, {axis})"),
    gradient=gradient_of(lambda b: reverse_cumsum(b, b.grad)),
)


# ATen spellings


@aten("cumsum.default")
def _cumsum(g: Builder, x: Value, dim: int, dtype: Any = None) -> Any:
    y = converted(g, x, dtype, True)
    return g.emit("cumsum", y, axis=axes_of(x, dim)[0]) if x.tensor.shape else y


# Relax spellings


@relax("relax.cumsum")
def _relax_cumsum(g: Builder, args: Any, attrs: Attrs) -> Any:
    if attrs["exclusive"]:
        raise NotImplementedError("an exclusive cumulative sum")
    x = args[0] if attrs["dtype"] in (None, "", "void") else cast(g, args[0], attrs["dtype"])
    if attrs["axis"] is None:
        x = g.emit("reshape", x, shape=(x.tensor.elements,))
    return g.emit("cumsum", x, axis=axes_of(x, attrs["axis"] or 0)[0])


# ONNX spellings


@onnx("CumSum")
def _onnx_cumsum(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axis = axes_of(x[0], x.number(1))[0]
    y = g.emit("flip", x[0], axis=axis) if attrs.get("reverse", 0) else x[0]
    # Integers are summed in 64 bits, as in torch.
    total = cast(g, g.emit("cumsum", converted(g, y, None, True), axis=axis), y.tensor.dtype)
    total = g.emit("subtract", total, y) if attrs.get("exclusive", 0) else total
    return g.emit("flip", total, axis=axis) if attrs.get("reverse", 0) else total
