"""Products and cumulative products over a dim. No placement is a partial product: the dim stays whole."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.reduction.cumsum import reverse_cumsum
from distir_relax.ops.reduction.reduction_axes import (
    axes_of,
    converted,
    infer_along_axis,
    relax_axes,
    unsplit_axis_rule,
)
from distir_relax.ops.table import (
    Attrs,
    Backward,
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
    gradient_of,
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
    result_names = " ".join(name for name in right if attrs["keepdims"] or name != "()")
    return parse_rule(f"{' '.join(names)} -> {result_names}", [types[0].shape], [results[0].shape])


def _zeros_and_factors(b: Backward) -> tuple[Value, Value]:
    """Return a mask of zeros in the operand, and the operand with ones there."""
    nought = b.emit("equal", b.x(), b.number(0.0))
    return nought, b.emit("where", nought, b.number(1.0), b.x())


def _product_back(b: Backward) -> Value:
    """Return the product of all other elements; if exactly one is zero, its gradient is the product of the others."""
    axis, shape, dtype = b.attrs["axis"], b.x().tensor.shape, b.grad.tensor.dtype
    nought, factors = _zeros_and_factors(b)
    own = cast(b.g, nought, dtype)
    count = b.emit("sum", own, axis=(axis,), keepdims=True)
    product = b.emit("prod", factors, axis=axis, keepdims=True)
    grad = reshape_to(b.g, b.grad, tuple(1 if d == axis else n for d, n in enumerate(shape)))
    others = b.emit("divide", b.emit("multiply", grad, product), factors)
    return b.emit("where", b.emit("equal", count, own), others, b.number(0.0))  # type: ignore[no-any-return]


def _products_back(b: Backward) -> Value:
    """Return each element's gradient from the products after it: up to the first zero, or from it up to the second."""
    axis, dtype = b.attrs["axis"], b.grad.tensor.dtype
    nought, factors = _zeros_and_factors(b)
    count = b.emit("cumsum", cast(b.g, nought, dtype), axis=axis)
    terms = b.emit("multiply", b.grad, b.emit("cumprod", factors, axis=axis))

    def behind(zeros: float) -> Value:
        masked = b.emit("where", b.emit("equal", count, b.number(zeros)), terms, b.number(0.0))
        return reverse_cumsum(b, masked)

    return b.emit("where", nought, behind(1.0), b.emit("divide", behind(0.0), factors))  # type: ignore[no-any-return]


define(
    "prod",
    Semantics(infer=_infer, torch="torch.prod({0}, {axis}, {keepdims}, dtype={0}.dtype)"),
    Split(_rule),
    cost=Cost(flops=lambda types, attrs, results: float(types[0].elements)),
    code=Code(relax="R.prod({0}, {axis}, {keepdims})"),
    gradient=gradient_of(_product_back),
)
define(
    "cumprod",
    Semantics(infer=infer_along_axis, torch="torch.cumprod({0}, {axis}, dtype={0}.dtype)"),
    Split(unsplit_axis_rule),
    code=Code(relax="R.cumprod({0}, {axis})"),
    gradient=gradient_of(_products_back),
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
    for axis in reversed(relax_axes(x, attrs["axis"])):
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
