"""Group and instance norms, decomposed into means.

The dims they reduce may be split; a few numbers per group are then communicated.
"""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.normalization.batch_norm import batch_norm
from distir_relax.ops.table import Attrs, Builder, OnnxOperands, aten, onnx, relax, reshape_to

# ATen spellings


@aten("group_norm.default")
def _group_norm(
    g: Builder, x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> Any:
    batch, channels, *places = x.tensor.shape
    opened = reshape_to(g, x, (batch, groups, channels // groups, *places))
    dims = tuple(range(2, len(opened.tensor.shape)))
    mean = g.emit("mean", opened, axis=dims, keepdims=True)
    centred = g.emit("subtract", opened, mean)
    variance = g.emit("mean", g.emit("square", centred), axis=dims, keepdims=True)
    scale = g.emit("rsqrt", g.emit("add", variance, g.constant(eps, x.tensor.dtype)))
    y = reshape_to(g, g.emit("multiply", centred, scale), x.tensor.shape)
    for name, vector in (("multiply", weight), ("add", bias)):
        if vector is not None:
            y = g.emit(name, y, reshape_to(g, vector, (channels, *(1,) * len(places))))
    return y


@aten("instance_norm.default")
def _instance_norm(
    g: Builder,
    x: Value,
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
        return _group_norm(g, x, x.tensor.shape[1], weight, bias, eps)
    return batch_norm(g, x, weight, bias, mean, var, False, momentum, eps, cudnn)


# Relax spellings


def _relax_norm(name: str) -> None:
    def convert(g: Builder, args: Any, attrs: Any) -> Any:
        x, weight, bias = args
        rank = len(x.tensor.shape)
        if attrs["channel_axis"] % rank != 1 or sorted(a % rank for a in attrs["axes"]) != list(range(2, rank)):
            raise NotImplementedError("a norm whose channels are not dim 1, or that leaves out dims of the picture")
        weight, bias = weight if attrs["scale"] else None, bias if attrs["center"] else None
        return _group_norm(g, x, attrs.get("num_groups", x.tensor.shape[1]), weight, bias, attrs["epsilon"])

    relax(f"relax.nn.{name}")(convert)


for _name in ("group_norm", "instance_norm"):
    _relax_norm(_name)


# ONNX spellings


@onnx("GroupNormalization")
def _onnx_group_norm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    groups, channels = attrs["num_groups"], x[0].tensor.shape[1]
    # Before opset 21, scale and bias have one number per group.
    scale, bias = (_expand_to_channels(g, x[i], channels) for i in (1, 2))
    return _group_norm(g, x[0], groups, scale, bias, attrs.get("epsilon", 1e-5))


def _expand_to_channels(g: Builder, vector: Value, channels: int) -> Any:
    (size,) = vector.tensor.shape
    if size == channels:
        return vector
    wide = g.emit("broadcast_to", reshape_to(g, vector, (size, 1)), shape=(size, channels // size))
    return reshape_to(g, wide, (channels,))


@onnx("InstanceNormalization")
def _onnx_instance_norm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _group_norm(g, x[0], x[0].tensor.shape[1], x[1], x[2], attrs.get("epsilon", 1e-5))
