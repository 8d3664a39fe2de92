"""Ops that see a whole dim at once: reductions, softmax and the norms."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.numbers import number_range
from distir_relax.ops.pointwise import cast
from distir_relax.ops.registry import (
    Attrs,
    Expand,
    Expansion,
    Types,
    aten,
    define,
    onnx_spelling,
    operands,
    relax_spelling,
)
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import reshape_to


def _infer_reduce(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = types[0].shape
    if any(not 0 <= a < len(shape) for a in attrs["axis"]):
        raise ValueError(f"axes {attrs['axis']} of a tensor of {len(shape)} dims")
    if attrs["keepdims"]:
        return (TensorType(tuple(1 if i in attrs["axis"] else n for i, n in enumerate(shape)), types[0].dtype),)
    return (TensorType(tuple(n for i, n in enumerate(shape) if i not in attrs["axis"]), types[0].dtype),)


def _reduce_rule(how: str) -> Any:
    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        names = [f"d{i}" for i in range(len(types[0].shape))]
        kept = ["()" if i in attrs["axis"] else n for i, n in enumerate(names)]
        right = " ".join(k for k in kept if attrs["keepdims"] or k != "()")
        return parse_rule(f"{' '.join(names)} -> {right}", [types[0].shape], [results[0].shape], reduce=how)

    return rule


def _torch_axes(name: str) -> str:
    return f"torch.{name}({{0}}, dim={{axis}}, keepdim={{keepdims}})"


def _relax_axes(name: str) -> str:
    return f"R.{name}({{0}}, {{axis}}, {{keepdims}})"


_INPUT_FLOPS = {"flops": lambda types, attrs, results: float(types[0].elements)}

define(
    "sum",
    infer=_infer_reduce,
    rule=_reduce_rule("sum"),
    torch="torch.sum({0}, dim={axis}, keepdim={keepdims}, dtype={0}.dtype)",
    relax=_relax_axes("sum"),
    linear=(operands(0),),
    **_INPUT_FLOPS,
)


def _extreme_of_none(name: str, lowest: float) -> Expand:
    def expand(x: Expansion) -> tuple[Value, ...]:
        """A device without elements has no extreme: it takes that of the value neutral to the reduction."""
        value, rank = x.operands[0], len(x.types[0].shape)
        empty = tuple(int(d in x.attrs["axis"] and x.may_be_empty(value, d)) for d in range(rank))
        if any(empty):
            number = number_range(x.types[0].dtype)[lowest > 0]
            value = x.emit("pad", value, low=(0,) * rank, high=empty, value=number)
        return (x.emit(name, value, axis=x.attrs["axis"], keepdims=x.attrs["keepdims"]),)

    return expand


for _name, _lowest in (("max", -math.inf), ("min", math.inf)):
    define(
        _name,
        infer=_infer_reduce,
        rule=_reduce_rule(_name),
        torch=_torch_axes(f"a{_name}"),
        relax=_relax_axes(_name),
        expand={"*": _extreme_of_none(_name, _lowest)},
        **_INPUT_FLOPS,
    )


def _split_mean(x: Expansion) -> tuple[Value, ...]:
    """The mean of a split dim: each device sums its own part and divides by the size of the whole."""
    count = math.prod(x.types[0].shape[a] for a in x.attrs["axis"])
    total = x.emit("sum", x.operands[0], axis=x.attrs["axis"], keepdims=x.attrs["keepdims"])
    scale = x.emit("constant", value=1.0 / count, dtype=x.types[0].dtype)
    return (x.emit("multiply", total, scale),)


define(
    "mean",
    infer=_infer_reduce,
    rule=_reduce_rule("sum"),
    torch=_torch_axes("mean"),
    relax=_relax_axes("mean"),
    linear=(operands(0),),
    expand={"*": _split_mean},
    **_INPUT_FLOPS,
)


# softmax, cumulative sums, norms: the dim they see must be whole


def _infer_same(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis = attrs.get("axis", 0)
    if not 0 <= axis < max(1, len(types[0].shape)):
        raise ValueError(f"axis {axis} of a tensor of {len(types[0].shape)} dims")
    return (TensorType(types[0].shape, types[0].dtype),)


def _axis_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    text = " ".join(f"[d{i}]" if i == attrs["axis"] else f"d{i}" for i in range(len(types[0].shape)))
    return parse_rule(f"{text} -> {text}", [types[0].shape], [results[0].shape])


for _name in ("softmax", "log_softmax"):
    define(
        f"nn.{_name}",
        infer=_infer_same,
        rule=_axis_rule,
        torch=f"F.{_name}({{0}}, {{axis}})",
        relax=f"R.nn.{_name}({{0}}, {{axis}})",
        flops=lambda types, attrs, results: 12.0 * results[0].elements,
    )
define(
    "cumsum",
    infer=_infer_same,
    rule=_axis_rule,
    torch="torch.cumsum({0}, {axis}, dtype={0}.dtype)",
    relax="R.cumsum({0}, {axis})",
    linear=(operands(0),),
)


def _infer_norm(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    normal = types[0].shape[len(types[0].shape) - len(types[1].shape) :]
    if any(t.shape != normal for t in types[1:]):
        raise ValueError(f"weights {[t.shape for t in types[1:]]} do not fit the last dims of {types[0].shape}")
    return (types[0],)


def _norm_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rank, normal = len(types[0].shape), len(types[1].shape)
    inner = " ".join(f"[n{i}]" for i in range(normal))
    outer = " ".join(f"d{i}" for i in range(rank - normal))
    weights = ", ".join([inner] * (len(types) - 1))
    return parse_rule(f"{outer} {inner}, {weights} -> {outer} {inner}", [t.shape for t in types], [results[0].shape])


_NORM_FLOPS = {"flops": lambda types, attrs, results: 8.0 * results[0].elements}

define(
    "nn.layer_norm",
    infer=_infer_norm,
    rule=_norm_rule,
    torch="F.layer_norm({0}, {1}.shape, {1}, {2}, {epsilon})",
    relax="R.nn.layer_norm({0}, {1}, {2}, {axes}, {epsilon})",
    **_NORM_FLOPS,
)
define(
    "nn.rms_norm",
    infer=_infer_norm,
    rule=_norm_rule,
    torch="F.rms_norm({0}, {1}.shape, {1}, {epsilon})",
    relax="R.nn.rms_norm({0}, {1}, {axes}, {epsilon})",
    **_NORM_FLOPS,
)


# ATen spellings


def _axes(x: Any, dim: Any) -> tuple[int, ...]:
    rank = len(x.type.shape)
    dims = range(rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return tuple(sorted(d + rank if d < 0 else d for d in dims))


def _converted(g: Any, x: Any, dtype: Any, summing: bool = False) -> Any:
    if dtype is not None:
        return cast(g, x, str(dtype).removeprefix("torch."))
    return cast(g, x, "int64") if summing and "float" not in x.type.dtype else x


@aten("sum.dim_IntList", "sum.default")
def _sum(g: Any, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return g.emit("sum", _converted(g, x, dtype, True), axis=_axes(x, dim), keepdims=keepdim)


@aten("mean.dim", "mean.default")
def _mean(g: Any, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return g.emit("mean", _converted(g, x, dtype), axis=_axes(x, dim), keepdims=keepdim)


@aten("amax.default")
def _amax(g: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return g.emit("max", x, axis=_axes(x, dim), keepdims=keepdim)


@aten("amin.default")
def _amin(g: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return g.emit("min", x, axis=_axes(x, dim), keepdims=keepdim)


@aten("softmax.int", "_softmax.default")
def _softmax(g: Any, x: Any, dim: int, dtype: Any = None) -> Any:
    return g.emit("nn.softmax", _converted(g, x, dtype or None), axis=_axes(x, dim)[0])


@aten("log_softmax.int", "_log_softmax.default")
def _log_softmax(g: Any, x: Any, dim: int, dtype: Any = None) -> Any:
    return g.emit("nn.log_softmax", _converted(g, x, dtype or None), axis=_axes(x, dim)[0])


@aten("cumsum.default")
def _cumsum(g: Any, x: Any, dim: int, dtype: Any = None) -> Any:
    return g.emit("cumsum", _converted(g, x, dtype, True), axis=_axes(x, dim)[0])


def _filled(g: Any, like: Any, shape: tuple[int, ...], value: float) -> Any:
    return g.emit("broadcast_to", g.constant(value, like.type.dtype), shape=shape)


@aten("layer_norm.default")
def _layer_norm(
    g: Any, x: Any, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> Any:
    axes = tuple(range(len(x.type.shape) - len(shape), len(x.type.shape)))
    weight = _filled(g, x, tuple(shape), 1.0) if weight is None else weight
    bias = _filled(g, x, tuple(shape), 0.0) if bias is None else bias
    return g.emit("nn.layer_norm", x, weight, bias, axes=axes, epsilon=eps)


@aten("rms_norm.default")
def _rms_norm(g: Any, x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    axes = tuple(range(len(x.type.shape) - len(shape), len(x.type.shape)))
    weight = _filled(g, x, tuple(shape), 1.0) if weight is None else weight
    smallest = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}.get(x.type.dtype, 2.0**-23)
    return g.emit("nn.rms_norm", x, weight, axes=axes, epsilon=smallest if eps is None else eps)


# Relax spellings


def _relax_reduction(name: str) -> None:
    def convert(g: Any, args: Any, attrs: Any) -> Any:
        return g.emit(name, args[0], axis=_axes(args[0], attrs["axis"]), keepdims=attrs["keepdims"])

    relax_spelling(f"relax.{name}")(convert)


def _relax_along_axis(name: str) -> None:
    def convert(g: Any, args: Any, attrs: Any) -> Any:
        return g.emit(name, args[0], axis=_axes(args[0], attrs["axis"])[0])

    relax_spelling(f"relax.{name}")(convert)


for _name in ("sum", "mean", "max", "min"):
    _relax_reduction(_name)
for _name in ("nn.softmax", "nn.log_softmax"):
    _relax_along_axis(_name)


@relax_spelling("relax.cumsum")
def _relax_cumsum(g: Any, args: Any, attrs: Any) -> Any:
    if attrs["exclusive"]:
        raise NotImplementedError("an exclusive cumulative sum")
    x = args[0] if attrs["dtype"] in (None, "", "void") else cast(g, args[0], attrs["dtype"])
    if attrs["axis"] is None:
        x = g.emit("reshape", x, shape=(x.type.elements,))
    return g.emit("cumsum", x, axis=_axes(x, attrs["axis"] or 0)[0])


@relax_spelling("relax.nn.layer_norm")
def _relax_layer_norm(g: Any, args: Any, attrs: Any) -> Any:
    x, weight, bias = args
    weight = weight if attrs["scale"] else _filled(g, x, weight.type.shape, 1.0)
    bias = bias if attrs["center"] else _filled(g, x, bias.type.shape, 0.0)
    return g.emit("nn.layer_norm", x, weight, bias, axes=_last_axes(x, attrs), epsilon=attrs["epsilon"])


@relax_spelling("relax.nn.rms_norm")
def _relax_rms_norm(g: Any, args: Any, attrs: Any) -> Any:
    return g.emit("nn.rms_norm", *args, axes=_last_axes(args[0], attrs), epsilon=attrs["epsilon"])


def _last_axes(x: Any, attrs: Any) -> tuple[int, ...]:
    axes, rank = _axes(x, attrs["axes"]), len(x.type.shape)
    if axes != tuple(range(rank - len(axes), rank)):
        raise NotImplementedError(f"a norm over dims {axes}, which are not the last of {rank}")
    return axes


# ONNX spellings


def _onnx_axes(x: Any, attrs: Any) -> tuple[int, ...]:
    """The dims that a reduction is over: an attribute in old models, an operand in new ones; all when there is none."""
    axes = x.numbers(1, attrs.get("axes"))
    return () if not axes and attrs.get("noop_with_empty_axes", 0) else _axes(x[0], axes or None)


def _onnx_reduction(name: str) -> None:
    def convert(g: Any, x: Any, attrs: Any) -> Any:
        axes = _onnx_axes(x, attrs)
        if name in ("max", "min") and not all(x[0].type.shape[a] for a in axes):
            raise NotImplementedError(f"the {name} of no elements")
        return g.emit(name, x[0], axis=axes, keepdims=bool(attrs.get("keepdims", 1))) if axes else x[0]

    onnx_spelling(f"Reduce{name.title()}")(convert)


for _name in ("sum", "mean", "max", "min"):
    _onnx_reduction(_name)


def _onnx_softmax(op_type: str, name: str) -> None:
    def convert(g: Any, x: Any, attrs: Any) -> Any:
        if attrs["opset"] >= 13:
            return g.emit(name, x[0], axis=_axes(x[0], attrs.get("axis", -1))[0])
        # Before opset 13 all dims from the axis on are one.
        shape = x[0].type.shape
        axis = attrs.get("axis", 1) % len(shape)
        flat = reshape_to(g, x[0], (*shape[:axis], math.prod(shape[axis:])))
        return reshape_to(g, g.emit(name, flat, axis=axis), shape)

    onnx_spelling(op_type)(convert)


_onnx_softmax("Softmax", "nn.softmax")
_onnx_softmax("LogSoftmax", "nn.log_softmax")


@onnx_spelling("CumSum")
def _onnx_cumsum(g: Any, x: Any, attrs: Any) -> Any:
    axis = _axes(x[0], x.number(1))[0]
    y = g.emit("flip", x[0], axis=axis) if attrs.get("reverse", 0) else x[0]
    # Integers are summed in 64 bits, as torch does.
    total = cast(g, g.emit("cumsum", _converted(g, y, None, True), axis=axis), y.type.dtype)
    total = g.emit("subtract", total, y) if attrs.get("exclusive", 0) else total
    return g.emit("flip", total, axis=axis) if attrs.get("reverse", 0) else total


@onnx_spelling("LayerNormalization")
def _onnx_layer_norm(g: Any, x: Any, attrs: Any) -> Any:
    shape = list(x[0].type.shape[attrs.get("axis", -1) :])
    weight, bias = (_fitted(g, x, i, shape) for i in (1, 2))
    y = _layer_norm(g, x[0], shape, weight, bias, attrs.get("epsilon", 1e-5))
    if attrs["outputs"] == 1:
        return y
    axes = tuple(range(len(x[0].type.shape) - len(shape), len(x[0].type.shape)))
    mean = g.emit("mean", x[0], axis=axes, keepdims=True)
    variance = g.emit("mean", g.emit("square", g.emit("subtract", x[0], mean)), axis=axes, keepdims=True)
    epsilon = g.constant(attrs.get("epsilon", 1e-5), x[0].type.dtype)
    return y, mean, g.emit("rsqrt", g.emit("add", variance, epsilon))


@onnx_spelling("RMSNormalization")
def _onnx_rms_norm(g: Any, x: Any, attrs: Any) -> Any:
    shape = list(x[0].type.shape[attrs.get("axis", -1) :])
    return _rms_norm(g, x[0], shape, _fitted(g, x, 1, shape), attrs.get("epsilon", 1e-5))


def _fitted(g: Any, x: Any, index: int, shape: list[int]) -> Any:
    """The scale or bias of a norm, which ONNX broadcasts to the normalised dims."""
    if not x.has(index) or list(x[index].type.shape) == shape:
        return x[index] if x.has(index) else None
    return g.emit("broadcast_to", x[index], shape=tuple(shape))
