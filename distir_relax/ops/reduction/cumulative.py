"""Cumulative sums, products, extremes and log-sum-exp, linear recurrences, and products over a dim.

No placement is a partial product or a part of a cumulative op: the dim stays whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from distir_relax.ir import Op, TensorType, Value
from distir_relax.layout import symbols_within
from distir_relax.ops.reduction.reduction_axes import axes_of, cast_for_reduction, infer_along_axis, relax_axes
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Element,
    IncrementalForm,
    IncrementalStep,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    cast,
    define,
    flops_per_operand,
    gradient_of,
    index_of,
    is_number,
    names_with,
    onnx,
    operands,
    parse_rule,
    promote,
    reduced_sizes,
    relax,
    reshape_to,
    unsplit_axis_rule,
)


def _reverse_cumsum(b: Backward, x: Value) -> Value:
    """Return the reversed cumulative sum of `x` along the op's axis."""
    axis = b.attrs["axis"]
    total: Value = b.emit("flip", b.emit("cumsum", b.emit("flip", x, axis=axis), axis=axis), axis=axis)
    return total


def _axis(op: Op) -> tuple[int]:
    return (op.attrs["axis"],)  # type: ignore[return-value]


def _continue_sum(step: IncrementalStep) -> Value:
    """Add the sum up to the last call, and keep the new one."""
    axis, shape = step.attrs["axis"], list(step.result.shape)
    shape[axis] = 1
    total = step.state(TensorType(tuple(shape), step.result.dtype), "total")
    sums: Value = step.emit("add", step.emit("cumsum", step.operands[0], axis=axis), total)
    last = step.emit("strided_slice", sums, axes=(axis,), begin=(step.new - 1,), end=(step.new,), strides=(1,))
    step.keep(total, last)
    return sums


def _continue_scan(name: str, neutral: float) -> IncrementalForm:
    """Return the form of a scan that begins with `neutral`: states are zero at first, and a second one says so."""

    def compute(step: IncrementalStep) -> Value:
        axis, shape = step.attrs["axis"], list(step.result.shape)
        shape[axis] = 1
        kind = TensorType(tuple(shape), step.result.dtype)
        total, is_later = step.state(kind, "total"), step.state(TensorType(kind.shape, "bool"), "later")
        first = step.emit("where", is_later, total, step.g.constant(neutral, step.result.dtype))
        scan = step.emit(name, step.emit("concat", first, step.operands[0], axis=axis), axis=axis)
        found = _after_first(step, scan, total)
        step.keep(is_later, step.emit("equal", is_later, is_later))
        return found

    return IncrementalForm(dims=_axis, compute=compute, carries=True)


def _after_first(step: IncrementalStep, scan: Value, total: Value) -> Value:
    """Keep the last element of a scan whose first is that of the last call, `total`; return all but the first."""

    def part(begin: int) -> Value:
        axes, end = (step.attrs["axis"],), (step.new + 1,)
        return step.emit("strided_slice", scan, axes=axes, begin=(begin,), end=end, strides=(1,))  # type: ignore[no-any-return]

    step.keep(total, part(step.new))
    return part(1)


def _after_zero(emit: Callable[..., Any], x: Value, axis: int) -> Value:
    """Emit `x` with a zero before its first element."""
    low = tuple(int(d == axis) for d in range(len(x.tensor.shape)))
    return emit("pad", x, low=low, high=(0,) * len(low), value=0)  # type: ignore[no-any-return]


def _sum_of_equal(elements: Sequence[Element], shapes: Any, attrs: Attrs, shape: Sequence[int]) -> Element | None:
    """Return the element where those along the axis are equal numbers."""
    (x,), along = elements, index_of(attrs["axis"])
    if not is_number(x) or symbols_within(along) <= symbols_within(x):
        return None
    return x * (along + 1)


define(
    "cumsum",
    Semantics(
        infer=infer_along_axis,
        torch="torch.cumsum({0}, {axis}, dtype={0}.dtype)",
        linear=(operands(0),),
        element=_sum_of_equal,
        running_sum="axis",
    ),
    Split(unsplit_axis_rule),
    code=Code(relax="R.cumsum({0}, {axis})"),
    gradient=gradient_of(lambda b: _reverse_cumsum(b, b.grad)),
    incremental=IncrementalForm(dims=_axis, compute=_continue_sum, carries=True),
)


def _infer_product(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (kind,) = infer_along_axis(types, attrs)
    shape = list(kind.shape)
    shape[attrs["axis"] : attrs["axis"] + 1] = [1] if attrs["keepdims"] else []
    return (TensorType(tuple(shape), kind.dtype),)


def _zeros_and_factors(b: Backward) -> tuple[Value, Value]:
    """Return a mask of zeros in the operand, and the operand with ones there."""
    zero_mask = b.emit("equal", b.x(), b.number(0.0))
    return zero_mask, b.emit("where", zero_mask, b.number(1.0), b.x())


def _product_gradient(b: Backward) -> Value:
    """Return the product of all other elements; if exactly one is zero, its gradient is the product of the others."""
    axis, shape, dtype = b.attrs["axis"], b.x().tensor.shape, b.grad.tensor.dtype
    zero_mask, factors = _zeros_and_factors(b)
    own = cast(b.g, zero_mask, dtype)
    count = b.emit("sum", own, axis=(axis,), keepdims=True)
    product = b.emit("prod", factors, axis=axis, keepdims=True)
    grad = reshape_to(b.g, b.grad, tuple(1 if d == axis else n for d, n in enumerate(shape)))
    others = b.emit("divide", b.emit("multiply", grad, product), factors)
    return b.emit("where", b.emit("equal", count, own), others, b.number(0.0))  # type: ignore[no-any-return]


def _cumprod_gradient(b: Backward) -> Value:
    """Return each element's gradient from the products after it: up to the first zero, or from it up to the second."""
    axis, dtype = b.attrs["axis"], b.grad.tensor.dtype
    zero_mask, factors = _zeros_and_factors(b)
    count = b.emit("cumsum", cast(b.g, zero_mask, dtype), axis=axis)
    terms = b.emit("multiply", b.grad, b.emit("cumprod", factors, axis=axis))

    def after(zeros: float) -> Value:
        masked = b.emit("where", b.emit("equal", count, b.number(zeros)), terms, b.number(0.0))
        return _reverse_cumsum(b, masked)

    return b.emit("where", zero_mask, after(1.0), b.emit("divide", after(0.0), factors))  # type: ignore[no-any-return]


define(
    "prod",
    Semantics(
        infer=_infer_product,
        torch="torch.prod({0}, {axis}, {keepdims}, dtype={0}.dtype)",
        sizes=reduced_sizes(operator.mul),
    ),
    Split(unsplit_axis_rule),
    cost=Cost(flops=flops_per_operand()),
    code=Code(relax="R.prod({0}, {axis}, {keepdims})"),
    gradient=gradient_of(_product_gradient),
)
define(
    "cumprod",
    Semantics(infer=infer_along_axis, torch="torch.cumprod({0}, {axis}, dtype={0}.dtype)"),
    Split(unsplit_axis_rule),
    code=Code(relax="R.cumprod({0}, {axis})"),
    gradient=gradient_of(_cumprod_gradient),
    incremental=_continue_scan("cumprod", 1),
)


def _infer_extremes(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (kind,) = infer_along_axis(types, attrs)
    return kind, TensorType(kind.shape, "int64")


def _extremes_gradient(b: Backward) -> Value:
    """Add the gradient of each extreme to its element."""
    zeros, axis = b.zeros(b.x()), b.attrs["axis"]
    return b.emit("scatter_elements", zeros, b.y(1), b.grad, axis=axis, reduction="add")  # type: ignore[no-any-return]


for _name in ("cummax", "cummin"):
    define(
        _name,
        Semantics(infer=_infer_extremes, torch=f"torch.{_name}({{0}}, {{axis}})"),
        Split(unsplit_axis_rule),
        code=Code(relax=f"scans.{_name}({{0}}, {{axis}})"),
        gradient=gradient_of(_extremes_gradient),
    )


def _log_sums_gradient(b: Backward) -> Value:
    """Emit ``sum(g[i] exp(x[j] - y[i]) for i >= j)`` by logarithms, separately for positive and negative gradients."""
    import torch

    axis, dtype = b.attrs["axis"], b.grad.tensor.dtype
    lowest = b.number(torch.finfo(getattr(torch, dtype)).min)

    def part(name: str) -> Value:
        mine = b.emit(name, b.grad, b.number(0.0))
        size = b.emit("where", mine, b.emit("abs", b.grad), b.number(1.0))
        terms = b.emit("subtract", b.emit("where", mine, b.emit("log", size), lowest), b.y())
        sums = b.emit("logcumsumexp", b.emit("flip", terms, axis=axis), axis=axis)
        return b.emit("exp", b.emit("add", b.emit("flip", sums, axis=axis), b.x()))  # type: ignore[no-any-return]

    return b.emit("subtract", part("greater"), part("less"))  # type: ignore[no-any-return]


define(
    "logcumsumexp",
    Semantics(infer=infer_along_axis, torch="torch.logcumsumexp({0}, {axis})"),
    Split(unsplit_axis_rule),
    cost=Cost(flops=flops_per_operand(16.0)),
    code=Code(relax="scans.logcumsumexp({0}, {axis})"),
    gradient=gradient_of(_log_sums_gradient),
    incremental=_continue_scan("logcumsumexp", -math.inf),
)


def _infer_linear_scan(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if types[0] != types[1]:
        raise ValueError(f"expected factors and terms of one type, found {types[0]} and {types[1]}")
    return infer_along_axis(types[1:], attrs)


def _linear_scan_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    names = names_with(len(types[0].shape), attrs["axis"], "[axis]")
    return parse_rule(f"{names}, {names} -> {names}", [t.shape for t in types], [results[0].shape])


def _sums_after(b: Backward) -> Value:
    """Return the gradient of each term: ``s[t] = grad[t] + factors[t + 1] * s[t + 1]``."""
    axis, factors = b.attrs["axis"], b.x(0)
    # Reversed, a sum takes the factor before its own; that of the first is not used.
    before = _shifted(b, b.emit("flip", factors, axis=axis))
    scan = b.emit("linear_scan", before, b.emit("flip", b.grad, axis=axis), axis=axis)
    return b.emit("flip", scan, axis=axis)  # type: ignore[no-any-return]


def _shifted(b: Backward, x: Value) -> Value:
    """Return `x` moved by one along the op's axis, with a zero at the beginning."""
    axis = b.attrs["axis"]
    padded, size = _after_zero(b.emit, x, axis), x.tensor.shape[axis]
    return b.emit("strided_slice", padded, axes=(axis,), begin=(0,), end=(size,), strides=(1,))  # type: ignore[no-any-return]


def _continue_linear_scan(step: IncrementalStep) -> Value:
    """Begin with the last value: states are zero at first, as a recurrence is before its first term."""
    axis, shape = step.attrs["axis"], list(step.result.shape)
    shape[axis] = 1
    last = step.state(TensorType(tuple(shape), step.result.dtype), "last")
    factors, terms = step.operands
    # The first factor is not used.
    factors = _after_zero(step.emit, factors, axis)
    scan = step.emit("linear_scan", factors, step.emit("concat", last, terms, axis=axis), axis=axis)
    return _after_first(step, scan, last)


# State-space models: Gu and Dao, Mamba: linear-time sequence modeling with selective state spaces, 2023.
define(
    "linear_scan",
    Semantics(infer=_infer_linear_scan, torch="scans.linear({0}, {1}, {axis})", linear=(operands(1),)),
    Split(_linear_scan_rule),
    cost=Cost(flops=flops_per_operand(1.0)),
    code=Code(relax="scans.linear({0}, {1}, {axis})"),
    gradient=gradient_of(lambda b: b.emit("multiply", _sums_after(b), _shifted(b, b.y())), _sums_after),
    incremental=IncrementalForm(dims=_axis, compute=_continue_linear_scan, carries=True),
)


# ATen spellings


def _aten_sums(name: str) -> Any:
    def convert(g: Builder, x: Value, dim: int, dtype: Any = None) -> Any:
        y = cast_for_reduction(g, x, dtype, True)
        return g.emit(name, y, axis=axes_of(x, dim)[0]) if x.tensor.shape else y

    return convert


def _aten_extremes(name: str) -> Any:
    def convert(g: Builder, x: Value, dim: int) -> Any:
        if not x.tensor.shape:
            return x, g.constant(0, "int64")
        return g.emit(name, x, axis=axes_of(x, dim)[0])

    return convert


for _name in ("cumsum", "cumprod"):
    aten(f"{_name}.default")(_aten_sums(_name))
for _name in ("cummax", "cummin"):
    aten(f"{_name}.default")(_aten_extremes(_name))


@aten("logcumsumexp.default")
def _logcumsumexp(g: Builder, x: Value, dim: int) -> Any:
    (x,) = promote(g, x, floating=True)
    return g.emit("logcumsumexp", x, axis=axes_of(x, dim)[0]) if x.tensor.shape else x


@aten("prod.dim_int")
def _prod(g: Builder, x: Value, dim: int, keepdim: bool = False, dtype: Any = None) -> Any:
    y = cast_for_reduction(g, x, dtype, True)
    return g.emit("prod", y, axis=axes_of(x, dim)[0], keepdims=keepdim) if x.tensor.shape else y


@aten("prod.default")
def _prod_all(g: Builder, x: Value, dtype: Any = None) -> Any:
    return _prod(g, reshape_to(g, x, (x.tensor.elements,)), 0, dtype=dtype)


def _prod_axes(g: Builder, x: Value, axes: tuple[int, ...], keepdims: bool) -> Any:
    for axis in reversed(axes):
        x = g.emit("prod", x, axis=axis, keepdims=keepdims)
    return x


# Relax spellings


@relax("relax.cumsum")
def _relax_cumsum(g: Builder, args: Any, attrs: Attrs) -> Any:
    if attrs["exclusive"]:
        raise NotImplementedError("an exclusive cumulative sum")
    x = args[0] if attrs["dtype"] in (None, "", "void") else cast(g, args[0], attrs["dtype"])
    if attrs["axis"] is None:
        x = g.emit("reshape", x, shape=(x.tensor.elements,))
    return g.emit("cumsum", x, axis=axes_of(x, attrs["axis"] or 0)[0])


@relax("relax.prod")
def _relax_prod(g: Builder, args: Any, attrs: Attrs) -> Any:
    return _prod_axes(g, args[0], relax_axes(args[0], attrs["axis"]), attrs["keepdims"])


# ONNX spellings


@onnx("CumSum")
def _onnx_cumsum(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axis = axes_of(x[0], x.number(1))[0]
    y = g.emit("flip", x[0], axis=axis) if attrs.get("reverse", 0) else x[0]
    # Integers are summed in 64 bits, as in torch.
    total = cast(g, g.emit("cumsum", cast_for_reduction(g, y, None, True), axis=axis), y.tensor.dtype)
    total = g.emit("subtract", total, y) if attrs.get("exclusive", 0) else total
    return g.emit("flip", total, axis=axis) if attrs.get("reverse", 0) else total


@onnx("ReduceProd")
def _onnx_prod(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axes = x.numbers(1, attrs.get("axes"))
    if not axes and attrs.get("noop_with_empty_axes", 0):
        return x[0]
    return _prod_axes(g, x[0], axes_of(x[0], axes or None), bool(attrs.get("keepdims", 1)))
