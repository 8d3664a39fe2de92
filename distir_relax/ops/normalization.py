"""Norms of pictures: batch norm at inference, and group and instance norms, written as means."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.registry import Attrs, Types, aten, define, onnx_spelling, relax_spelling
from distir_relax.ops.rule import Rule, parse_rule
from distir_relax.ops.shape import reshape_to


def _infer_batch_norm(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = types[0]
    if len(x.shape) < 2 or any(t.shape != (x.shape[1],) for t in types[1:]) or len(types) != 5:
        raise ValueError("data, and four vectors of as many elements as the data has channels")
    return (x,)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    dims = " ".join(f"d{i}" if i != 1 else "c" for i in range(len(types[0].shape)))
    return parse_rule(f"{dims}, c, c, c, c -> {dims}", [t.shape for t in types], [results[0].shape])


define(
    "nn.batch_norm",
    infer=_infer_batch_norm,
    rule=_rule,
    torch="F.batch_norm({0}, {3}, {4}, {1}, {2}, False, 0.0, {epsilon})",
    relax="R.nn.batch_norm({0}, {1}, {2}, {3}, {4}, 1, {epsilon}, training=False)[0]",
    zero_if_empty=True,
    flops=lambda types, attrs, results: 2.0 * results[0].elements,
)


@aten("batch_norm.default")
def _batch_norm(
    g: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if training or mean is None or var is None:
        raise NotImplementedError("a batch norm in training mode; call model.eval() first")
    weight = _filled(g, x, 1.0) if weight is None else weight
    bias = _filled(g, x, 0.0) if bias is None else bias
    return g.emit("nn.batch_norm", x, weight, bias, mean, var, epsilon=eps)


def _filled(g: Any, x: Any, number: float) -> Any:
    return g.emit("broadcast_to", g.constant(number, x.type.dtype), shape=x.type.shape[1:2])


@relax_spelling("relax.nn.batch_norm")
def _relax_batch_norm(g: Any, args: Any, attrs: Any) -> Any:
    if attrs["axis"] != 1 or attrs["training"] or not (attrs["center"] and attrs["scale"]):
        raise NotImplementedError("a batch norm that is in training mode, off axis 1, or without scale and shift")
    y = g.emit("nn.batch_norm", *args, epsilon=attrs["epsilon"])
    return y, args[3], args[4]


@onnx_spelling("BatchNormalization")
def _onnx_batch_norm(g: Any, x: Any, attrs: Any) -> Any:
    if attrs.get("training_mode", 0) or not attrs.get("spatial", 1):
        raise NotImplementedError("a batch norm in training mode, or one that is not per channel")
    return g.emit("nn.batch_norm", *[x[i] for i in range(5)], epsilon=attrs.get("epsilon", 1e-5))


# Group and instance norms, of means: these may be over split dims, and then a few numbers are sent for each group


@aten("group_norm.default")
def _group_norm(
    g: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> Any:
    batch, channels, *places = x.type.shape
    opened = reshape_to(g, x, (batch, groups, channels // groups, *places))
    dims = tuple(range(2, len(opened.type.shape)))
    mean = g.emit("mean", opened, axis=dims, keepdims=True)
    centred = g.emit("subtract", opened, mean)
    variance = g.emit("mean", g.emit("square", centred), axis=dims, keepdims=True)
    scale = g.emit("rsqrt", g.emit("add", variance, g.constant(eps, x.type.dtype)))
    y = reshape_to(g, g.emit("multiply", centred, scale), x.type.shape)
    for name, vector in (("multiply", weight), ("add", bias)):
        if vector is not None:
            y = g.emit(name, y, reshape_to(g, vector, (channels, *(1,) * len(places))))
    return y


@aten("instance_norm.default")
def _instance_norm(
    g: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if use_input_stats:
        return _group_norm(g, x, x.type.shape[1], weight, bias, eps)
    return _batch_norm(g, x, weight, bias, mean, var, False, momentum, eps, cudnn)


def _relax_norm(name: str) -> None:
    def convert(g: Any, args: Any, attrs: Any) -> Any:
        x, weight, bias = args
        rank = len(x.type.shape)
        if attrs["channel_axis"] % rank != 1 or sorted(a % rank for a in attrs["axes"]) != list(range(2, rank)):
            raise NotImplementedError("a norm whose channels are not dim 1, or that leaves out dims of the picture")
        weight, bias = weight if attrs["scale"] else None, bias if attrs["center"] else None
        return _group_norm(g, x, attrs.get("num_groups", x.type.shape[1]), weight, bias, attrs["epsilon"])

    relax_spelling(f"relax.nn.{name}")(convert)


for _name in ("group_norm", "instance_norm"):
    _relax_norm(_name)


@onnx_spelling("GroupNormalization")
def _onnx_group_norm(g: Any, x: Any, attrs: Any) -> Any:
    groups, channels = attrs["num_groups"], x[0].type.shape[1]
    # Before opset 21 scale and bias have one number for each group.
    scale, bias = (_repeated(g, x[i], channels) for i in (1, 2))
    return _group_norm(g, x[0], groups, scale, bias, attrs.get("epsilon", 1e-5))


def _repeated(g: Any, vector: Any, channels: int) -> Any:
    (size,) = vector.type.shape
    if size == channels:
        return vector
    wide = g.emit("broadcast_to", reshape_to(g, vector, (size, 1)), shape=(size, channels // size))
    return reshape_to(g, wide, (channels,))


@onnx_spelling("InstanceNormalization")
def _onnx_instance_norm(g: Any, x: Any, attrs: Any) -> Any:
    return _group_norm(g, x[0], x[0].type.shape[1], x[1], x[2], attrs.get("epsilon", 1e-5))
