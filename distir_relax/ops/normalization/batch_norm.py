"""Batch norm at inference, with statistics that are known."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    define,
    filled,
    onnx,
    parse_rule,
    relax,
)


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
    Semantics(infer=_infer_batch_norm, torch="F.batch_norm({0}, {3}, {4}, {1}, {2}, False, 0.0, {epsilon})"),
    Split(_rule),
    cost=Cost(flops=lambda types, attrs, results: 2.0 * results[0].elements),
    code=Code(relax="R.nn.batch_norm({0}, {1}, {2}, {3}, {4}, 1, {epsilon}, training=False)[0]"),
    traits={Trait.ZERO_IF_EMPTY},
)


# ATen spellings


@aten("batch_norm.default")
def batch_norm(
    g: Builder,
    x: Value,
    weight: Value,
    bias: Value,
    mean: Value,
    var: Value,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """Emit a batch norm of `x`; raises NotImplementedError for one in training mode."""
    if training or mean is None or var is None:
        raise NotImplementedError("a batch norm in training mode; call model.eval() first")
    weight = filled(g, x.tensor.shape[1:2], 1.0, x.tensor.dtype) if weight is None else weight
    bias = filled(g, x.tensor.shape[1:2], 0.0, x.tensor.dtype) if bias is None else bias
    return g.emit("nn.batch_norm", x, weight, bias, mean, var, epsilon=eps)


# Relax spellings


@relax("relax.nn.batch_norm")
def _relax_batch_norm(g: Builder, args: Any, attrs: Attrs) -> Any:
    if attrs["axis"] != 1 or attrs["training"] or not (attrs["center"] and attrs["scale"]):
        raise NotImplementedError("a batch norm that is in training mode, off axis 1, or without scale and shift")
    y = g.emit("nn.batch_norm", *args, epsilon=attrs["epsilon"])
    return y, args[3], args[4]


# ONNX spellings


@onnx("BatchNormalization")
def _onnx_batch_norm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    if attrs.get("training_mode", 0) or not attrs.get("spatial", 1):
        raise NotImplementedError("a batch norm in training mode, or one that is not per channel")
    return g.emit("nn.batch_norm", *[x[i] for i in range(5)], epsilon=attrs.get("epsilon", 1e-5))
