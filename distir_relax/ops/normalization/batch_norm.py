"""Batch norm: an entry for given statistics; a decomposition for statistics of the batch."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.layout import maximum
from distir_relax.ops.table import (
    Attrs,
    Backward,
    Builder,
    Code,
    Cost,
    Gradient,
    OnnxOperands,
    Rule,
    Semantics,
    Split,
    Trait,
    Types,
    aten,
    cast,
    define,
    filled,
    flops_per_result,
    like,
    onnx,
    parse_rule,
    ratio,
    relax,
    reshape_to,
)


def _infer_batch_norm(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = types[0]
    if len(x.shape) < 2 or any(t.shape != (x.shape[1],) for t in types[1:]) or len(types) != 5:
        raise ValueError("expected data, and four vectors of as many elements as the data has channels")
    return (x,)


def _rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    dims = " ".join(f"d{i}" if i != 1 else "c" for i in range(len(types[0].shape)))
    return parse_rule(f"{dims}, c, c, c, c -> {dims}", [t.shape for t in types], [results[0].shape])


def _gradient(b: Backward) -> tuple[Value | None, ...]:
    """The statistics are constants: no gradient passes to them, as in torch."""
    x, weight, _, mean, variance = b.op.operands
    others = tuple(d for d in range(len(x.tensor.shape)) if d != 1)
    wide = (x.tensor.shape[1], *[1] * (len(others) - 1))

    def spread(vector: Value) -> Value:
        return reshape_to(b.g, vector, wide)  # type: ignore[no-any-return]

    scale = b.emit("rsqrt", b.emit("add", variance, b.number(b.attrs["epsilon"])))
    grad = b.emit("multiply", b.grad, spread(b.emit("multiply", scale, weight)))
    normed = b.emit("multiply", b.emit("subtract", x, spread(mean)), spread(scale))
    of_weight = b.emit("sum", b.emit("multiply", b.grad, normed), axis=others, keepdims=False)
    return grad, of_weight, b.emit("sum", b.grad, axis=others, keepdims=False), None, None


define(
    "nn.batch_norm",
    Semantics(infer=_infer_batch_norm, torch="F.batch_norm({0}, {3}, {4}, {1}, {2}, False, 0.0, {epsilon})"),
    Split(_rule),
    cost=Cost(flops=flops_per_result(2.0)),
    code=Code(relax="R.nn.batch_norm({0}, {1}, {2}, {3}, {4}, 1, {epsilon}, training=False)[0]"),
    gradient=Gradient(all=_gradient),
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
    """Emit a batch norm of `x`, with the given statistics, or in training mode and without any, with the batch's."""
    if training or mean is None or var is None:
        return batch_statistics(g, x, weight, bias, eps)[0]
    weight = filled(g, x.tensor.shape[1:2], 1.0, x.tensor.dtype) if weight is None else weight
    bias = filled(g, x.tensor.shape[1:2], 0.0, x.tensor.dtype) if bias is None else bias
    return g.emit("nn.batch_norm", x, weight, bias, mean, var, epsilon=eps)


@aten("_native_batch_norm_legit_functional.default")
def _batch_norm_training(
    g: Builder, x: Value, weight: Any, bias: Any, mean: Value, var: Value, training: bool, momentum: float, eps: float
) -> Any:
    """As `torch.export` writes batch norm in training mode: with the batch's statistics, and new running ones."""
    if not training:
        y = batch_norm(g, x, weight, bias, mean, var, False, momentum, eps, False)
        return y, None, None, mean, var
    # As torch, with statistics in float32.
    wide = "float32" if x.tensor.dtype in ("bfloat16", "float16") else x.tensor.dtype
    scale, shift = (None if side is None else cast(g, side, wide) for side in (weight, bias))
    y, batch_mean, batch_var = batch_statistics(g, cast(g, x, wide), scale, shift, eps)
    count = x.tensor.elements // x.tensor.shape[1]
    unbiased = g.emit("multiply", batch_var, ratio(g, count, maximum(1, count - 1), batch_var.tensor.dtype))
    running = [
        g.aten("lerp.Scalar", cast(g, old, wide), new, momentum) for old, new in ((mean, batch_mean), (var, unbiased))
    ]
    deviation = g.emit("rsqrt", g.emit("add", batch_var, like(g, batch_var, eps)))
    return *(cast(g, value, x.tensor.dtype) for value in (y, batch_mean, deviation)), *running


@aten("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    g: Builder, x: Value, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    unused = filled(g, (x.tensor.shape[1],), 0.0, "float32")
    return _batch_norm_training(g, x, weight, bias, unused, unused, True, momentum, eps)[:3]


@aten("_native_batch_norm_legit_no_training.default")
def _batch_norm_inference(
    g: Builder, x: Value, weight: Any, bias: Any, mean: Value, var: Value, momentum: float, eps: float
) -> Any:
    nothing = filled(g, (0,), 0.0, x.tensor.dtype)
    return batch_norm(g, x, weight, bias, mean, var, False, momentum, eps, False), nothing, nothing


def batch_statistics(g: Builder, x: Value, weight: Any, bias: Any, eps: float) -> tuple[Value, Value, Value]:
    """Return `x` normalized per channel, with the mean and the biased variance over all other dims, ``(channels,)``."""
    others = [i for i in range(len(x.tensor.shape)) if i != 1]
    wide = (x.tensor.shape[1], *[1] * (len(x.tensor.shape) - 2))
    variance, mean = g.aten("var_mean.correction", x, others, correction=0, keepdim=True)
    deviation = g.emit("sqrt", g.emit("add", variance, like(g, variance, eps)))
    y = g.emit("divide", g.emit("subtract", x, mean), deviation)
    for name, side in (("multiply", weight), ("add", bias)):
        if side is not None:
            y = g.emit(name, y, reshape_to(g, side, wide))
    flat = (x.tensor.shape[1],)
    return y, reshape_to(g, mean, flat), reshape_to(g, variance, flat)


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
