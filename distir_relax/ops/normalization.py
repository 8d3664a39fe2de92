"""Batch normalization, at inference: each channel has its own scale and shift."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.registry import Attrs, Types, aten, define, onnx_spelling, relax_spelling
from distir_relax.ops.rule import Rule, parse_rule


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
