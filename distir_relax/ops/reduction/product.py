"""Products over a dim, whole and cumulative. No pending reduction stands for them: the dim stays on one device."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.reduction.axes import axes_of, converted, infer_along_axis, whole_axis_rule
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    cast,
    define,
    onnx,
    parse_rule,
    relax,
    reshape_to,
)


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (kind,) = infer_along_axis(types, attrs)
    shape = list(kind.shape)
    shape[attrs["axis"] : attrs["axis"] + 1] = [1] if attrs["keepdims"] else []
    return (TensorType(tuple(shape), kind.dtype),)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = [f"[d{i}]" if i == attrs["axis"] else f"d{i}" for i in range(len(types[0].shape))]
    right = ["()" if i == attrs["axis"] else name for i, name in enumerate(names)]
    kept = " ".join(name for name in right if attrs["keepdims"] or name != "()")
    return parse_rule(f"{' '.join(names)} -> {kept}", [types[0].shape], [results[0].shape])


define(
    "prod",
    Semantics(infer=_infer, torch="torch.prod({0}, {axis}, {keepdims}, dtype={0}.dtype)"),
    Split(_rule),
    cost=Cost(flops=lambda types, attrs, results: float(types[0].elements)),
    code=Code(relax="R.prod({0}, {axis}, {keepdims})"),
)
define(
    "cumprod",
    Semantics(infer=infer_along_axis, torch="torch.cumprod({0}, {axis}, dtype={0}.dtype)"),
    Split(whole_axis_rule),
    code=Code(relax="R.cumprod({0}, {axis})"),
)


# ATen spellings


@aten("prod.dim_int")
def _prod(g: Builder, x: Value, dim: int, keepdim: bool = False, dtype: Any = None) -> Any:
    y = converted(g, x, dtype, True)
    return g.emit("prod", y, axis=axes_of(x, dim)[0], keepdims=keepdim) if x.tensor.shape else y


@aten("prod.default")
def _prod_all(g: Builder, x: Value, dtype: Any = None) -> Any:
    return _prod(g, reshape_to(g, x, (x.tensor.elements,)), 0, dtype=dtype)


@aten("cumprod.default")
def _cumprod(g: Builder, x: Value, dim: int, dtype: Any = None) -> Any:
    y = converted(g, x, dtype, True)
    return g.emit("cumprod", y, axis=axes_of(x, dim)[0]) if x.tensor.shape else y


# Relax spellings


@relax("relax.prod")
def _relax_prod(g: Builder, args: Any, attrs: Attrs) -> Any:
    x = args[0]
    for axis in reversed(axes_of(x, attrs["axis"])):
        x = g.emit("prod", x, axis=axis, keepdims=attrs["keepdims"])
    return x


# ONNX spellings


@onnx("ReduceProd")
def _onnx_prod(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axes = x.numbers(1, attrs.get("axes"))
    y = x[0]
    if not axes and attrs.get("noop_with_empty_axes", 0):
        return y
    for axis in reversed(axes_of(y, axes or None)):
        y = g.emit("prod", y, axis=axis, keepdims=bool(attrs.get("keepdims", 1)))
    return cast(g, y, x[0].tensor.dtype)
