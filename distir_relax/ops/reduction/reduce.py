"""Sums, means, maxima and minima over dims, and reductions composed of them."""

from __future__ import annotations

import math
import operator
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.layout import is_symbolic, maximum, minimum
from distir_relax.ops.reduction.reduction_axes import (
    axes_of,
    cast_for_reduction,
    reduced_shape,
    reduces_all,
    relax_axes,
)
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Expand,
    Expansion,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Types,
    aten,
    cast,
    define,
    filled,
    flops_per_operand,
    gradient_of,
    like,
    number_range,
    onnx,
    operands,
    parse_rule,
    promote,
    ratio,
    reduced_sizes,
    relax,
    reshape_to,
)


def _infer_reduce(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = types[0].shape
    if any(not 0 <= a < len(shape) for a in attrs["axis"]):
        raise ValueError(f"axes {attrs['axis']} of a tensor of {len(shape)} dims")
    if "ties" in attrs and (attrs["ties"] != "first" or len(attrs["axis"]) != 1):
        raise ValueError(f"expected ties 'first' along one axis, found {attrs['ties']!r} along {attrs['axis']}")
    if attrs["keepdims"]:
        return (TensorType(tuple(1 if i in attrs["axis"] else n for i, n in enumerate(shape)), types[0].dtype),)
    return (TensorType(tuple(n for i, n in enumerate(shape) if i not in attrs["axis"]), types[0].dtype),)


def _reduce_rule(how: str) -> Any:
    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        names = [f"d{i}" for i in range(len(types[0].shape))]
        reduced = ["()" if i in attrs["axis"] else n for i, n in enumerate(names)]
        right = " ".join(k for k in reduced if attrs["keepdims"] or k != "()")
        return parse_rule(f"{' '.join(names)} -> {right}", [types[0].shape], [results[0].shape], reduce=how)

    return rule


def _torch_axes(name: str, more: str = "") -> Any:
    """An empty tuple of axes reduces nothing, here and in Relax; torch reads it as all axes."""

    def expression(attrs: Attrs) -> str:
        return f"torch.{name}({{0}}, dim={{axis}}, keepdim={{keepdims}}{more})" if attrs["axis"] else "{0}.clone()"

    return expression


def _relax_axes(name: str) -> str:
    return f"R.{name}({{0}}, {{axis}}, {{keepdims}})"


def _broadcast_reduced(b: Backward, value: Value) -> Value:
    """Broadcast a reduced value to the shape of the operand."""
    return b.keepdims(value, b.attrs["axis"], b.x().tensor.shape)


def _mean_weight(b: Backward) -> Value:
    axes: tuple[int, ...] = b.attrs["axis"]
    count = maximum(1, math.prod(b.x().tensor.shape[a] for a in axes))
    weight: Value = ratio(b, 1, count, b.grad.tensor.dtype) if is_symbolic(count) else b.number(1 / count)
    return weight


def _extreme_gradient(b: Backward) -> Value:
    """Pass the gradient to the extremes: in equal shares as in torch's amax, or to the first as in its max.dim."""
    if "ties" in b.attrs:
        return _first_extreme_gradient(b)
    mine = cast(b.g, b.emit("equal", b.x(), _broadcast_reduced(b, b.y())), b.grad.tensor.dtype)
    count = b.emit("sum", mine, axis=b.attrs["axis"], keepdims=b.attrs["keepdims"])
    grad: Value = b.emit("multiply", mine, _broadcast_reduced(b, b.emit("divide", b.grad, count)))
    return grad


def _first_extreme_gradient(b: Backward) -> Value:
    (axis,) = b.attrs["axis"]
    shape = b.x().tensor.shape
    first = b.emit(f"arg{b.op.name}", b.x(), axis=axis, keepdims=True)
    grad = reshape_to(b.g, b.grad, tuple(1 if d == axis else n for d, n in enumerate(shape)))
    zeros = b.zeros(b.x())
    return b.emit("scatter_elements", zeros, first, grad, axis=axis, reduction="update")  # type: ignore[no-any-return]


_INPUT_COST = Cost(flops=flops_per_operand())

define(
    "sum",
    Semantics(
        infer=_infer_reduce,
        torch=_torch_axes("sum", ", dtype={0}.dtype"),
        linear=(operands(0),),
        sizes=reduced_sizes(operator.add),
    ),
    Split(_reduce_rule("sum")),
    cost=_INPUT_COST,
    code=Code(relax=_relax_axes("sum")),
    gradient=gradient_of(lambda b: _broadcast_reduced(b, b.grad)),
)


def _split_extreme(name: str, lowest: float) -> Expand:
    def expand(x: Expansion) -> tuple[Value, ...]:
        """A device without elements uses the neutral value of the reduction as its extreme."""
        value, rank = x.operands[0], len(x.types[0].shape)
        empty = tuple(int(d in x.attrs["axis"] and x.may_be_empty(value, d)) for d in range(rank))
        if any(empty):
            number = number_range(x.types[0].dtype)[lowest > 0]
            value = x.emit("pad", value, low=(0,) * rank, high=empty, value=number)
        return (x.emit(name, value, axis=x.attrs["axis"], keepdims=x.attrs["keepdims"]),)

    return expand


for _name, _lowest, _extremum in (("max", -math.inf, maximum), ("min", math.inf, minimum)):
    define(
        _name,
        Semantics(infer=_infer_reduce, torch=_torch_axes(f"a{_name}"), sizes=reduced_sizes(_extremum)),
        Split(_reduce_rule(_name), expand={"*": _split_extreme(_name, _lowest)}),
        cost=_INPUT_COST,
        code=Code(relax=_relax_axes(_name)),
        gradient=gradient_of(_extreme_gradient),
    )


def _split_mean(x: Expansion) -> tuple[Value, ...]:
    """Split a mean: each device sums its own part and divides by the size of the whole dim."""
    count = math.prod(x.types[0].shape[a] for a in x.attrs["axis"])
    total = x.emit("sum", x.operands[0], axis=x.attrs["axis"], keepdims=x.attrs["keepdims"])
    return (x.emit("multiply", total, ratio(x, 1, count, x.types[0].dtype)),)


define(
    "mean",
    Semantics(infer=_infer_reduce, torch=_torch_axes("mean"), linear=(operands(0),)),
    Split(_reduce_rule("sum"), expand={"*": _split_mean}),
    cost=_INPUT_COST,
    code=Code(relax=_relax_axes("mean")),
    gradient=gradient_of(lambda b: _broadcast_reduced(b, b.emit("multiply", b.grad, _mean_weight(b)))),
)


# ATen spellings


@aten("sum.dim_IntList", "sum.default")
def _sum(g: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return g.emit("sum", cast_for_reduction(g, x, dtype, True), axis=axes_of(x, dim), keepdims=keepdim)


@aten("mean.dim", "mean.default")
def _mean(g: Builder, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return g.emit("mean", cast_for_reduction(g, x, dtype), axis=axes_of(x, dim), keepdims=keepdim)


@aten("amax.default", "max.default")
def _amax(g: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    return g.emit("max", x, axis=axes_of(x, dim), keepdims=keepdim)


@aten("amin.default", "min.default")
def _amin(g: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    return g.emit("min", x, axis=axes_of(x, dim), keepdims=keepdim)


@aten("aminmax.default")
def _aminmax(g: Builder, x: Value, *, dim: int | None = None, keepdim: bool = False) -> Any:
    return _amin(g, x, dim, keepdim), _amax(g, x, dim, keepdim)


def _aten_logical_reduction(name: str, identity: bool) -> Any:
    def convert(g: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        # uint8 is torch's only numeric dtype of logical results.
        dtype = "uint8" if x.tensor.dtype == "uint8" else "bool"
        if reduces_all(x, dim):
            return filled(g, reduced_shape(x, dim, keepdim), identity, dtype)
        booleans = x if x.tensor.dtype == "bool" else g.emit("not_equal", x, g.constant(0, x.tensor.dtype))
        extreme = g.aten(name, cast(g, booleans, "int32"), dim, keepdim)
        return cast(g, g.emit("not_equal", extreme, g.constant(0, "int32")), dtype)

    return convert


aten("any.default", "any.dim", "any.dims")(_aten_logical_reduction("amax.default", identity=False))
aten("all.default", "all.dim", "all.dims")(_aten_logical_reduction("amin.default", identity=True))


@aten("count_nonzero.default", "count_nonzero.dim_IntList")
def _count_nonzero(g: Builder, x: Value, dim: Any = None) -> Any:
    booleans = x if x.tensor.dtype == "bool" else g.emit("not_equal", x, like(g, x, 0))
    return g.aten("sum.dim_IntList", booleans, dim)


@aten("logsumexp.default")
def _logsumexp(g: Builder, x: Value, dim: Any, keepdim: bool = False) -> Any:
    """Subtract the maximum first, so that no exponential overflows; an infinite maximum is the result."""
    (x,) = promote(g, x, floating=True)
    shape = reduced_shape(x, dim, keepdim)
    if reduces_all(x, dim):
        return filled(g, shape, -math.inf, x.tensor.dtype)
    largest = _amax(g, x, dim, True)
    finite = g.emit("where", g.emit("isfinite", largest), largest, like(g, x, 0))
    total = _sum(g, g.emit("exp", g.emit("subtract", x, finite)), dim, True)
    return reshape_to(g, g.emit("add", g.emit("log", total), finite), shape)


# Relax spellings


def _relax_reduction(name: str) -> None:
    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        return g.emit(name, args[0], axis=relax_axes(args[0], attrs["axis"]), keepdims=attrs["keepdims"])

    relax(f"relax.{name}")(convert)


for _name in ("sum", "mean", "max", "min"):
    _relax_reduction(_name)


# ONNX spellings


def _onnx_axes(x: Any, attrs: Any) -> tuple[int, ...]:
    """Return the axes of a reduction: an attribute in old models, an operand in new ones; all axes if omitted."""
    axes = x.numbers(1, attrs.get("axes"))
    return () if not axes and attrs.get("noop_with_empty_axes", 0) else axes_of(x[0], axes or None)


def _onnx_reduction(name: str) -> None:
    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        axes = _onnx_axes(x, attrs)
        if name in ("max", "min") and not all(x[0].tensor.shape[a] for a in axes):
            raise NotImplementedError(f"the {name} of no elements")
        return g.emit(name, x[0], axis=axes, keepdims=bool(attrs.get("keepdims", 1))) if axes else x[0]

    onnx(f"Reduce{name.title()}")(convert)


for _name in ("sum", "mean", "max", "min"):
    _onnx_reduction(_name)


def _onnx_sum_of(op_type: str, before: str, after: str) -> None:
    def convert(g: Builder, x: Any, attrs: Any) -> Any:
        y = g.emit(before, x[0]) if before else x[0]
        axes = x.numbers(1, attrs.get("axes"))
        if axes or not attrs.get("noop_with_empty_axes", 0):
            y = g.aten("sum.dim_IntList", y, axes, bool(attrs.get("keepdims", 1)), x[0].tensor.dtype)
        return g.emit(after, y) if after else y

    onnx(op_type)(convert)


_onnx_sum_of("ReduceSumSquare", "square", "")
_onnx_sum_of("ReduceL1", "abs", "")
_onnx_sum_of("ReduceL2", "square", "safe_sqrt")
_onnx_sum_of("ReduceLogSum", "", "log")


@onnx("ReduceLogSumExp")
def _onnx_log_sum_exp(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    axes = _onnx_axes(x, attrs)
    return _logsumexp(g, x[0], axes, bool(attrs.get("keepdims", 1))) if axes else x[0]
