"""Layer norm and RMS norm; the normalized dims must be whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.normalization.norm_gradients import layer_norm_gradient, rms_norm_gradient
from distir_relax.ops.reduction.reduction_axes import axes_of
from distir_relax.ops.table import (
    Attrs,
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
    define,
    filled,
    flops_per_result,
    onnx,
    parse_rule,
    relax,
)


def _infer_norm(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    normal = types[0].shape[len(types[0].shape) - len(types[1].shape) :]
    if any(t.shape != normal for t in types[1:]):
        raise ValueError(f"weights {[t.shape for t in types[1:]]} do not fit the last dims of {types[0].shape}")
    if any(t.dtype not in (types[0].dtype, "float32") for t in types[1:]):
        raise ValueError(f"weights are {[t.dtype for t in types[1:]]}, expected {types[0].dtype} or float32")
    return (types[0],)


def _norm_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    rank, normal = len(types[0].shape), len(types[1].shape)
    inner = " ".join(f"[n{i}]" for i in range(normal))
    outer = " ".join(f"d{i}" for i in range(rank - normal))
    weights = ", ".join([inner] * (len(types) - 1))
    return parse_rule(f"{outer} {inner}, {weights} -> {outer} {inner}", [t.shape for t in types], [results[0].shape])


def _norm_attrs(shapes: Sequence[tuple[Any, ...]], captured: Attrs) -> Attrs | None:
    """Return the attributes of a norm that is spelled out, if its mean is over the dims of its weight."""
    rank, normal = len(shapes[0]), len(shapes[1])
    axes, epsilon = captured["axes"], captured["epsilon"]
    return {"axes": axes, "epsilon": epsilon} if axes == tuple(range(rank - normal, rank)) else None


def _define_norm(name: str, torch: str, code: Code, gradient: Gradient) -> None:
    define(
        name,
        Semantics(infer=_infer_norm, torch=torch),
        Split(_norm_rule),
        cost=Cost(flops=flops_per_result(8.0)),
        code=code,
        gradient=gradient,
        traits={Trait.NATIVE},
    )


_WIDE = 'astype(0, dtype="float32")'
_NORMAL = "multiply({x}, rsqrt(add(mean(square({x}), axis=axes, keepdims=True), epsilon)))"
_define_norm(
    "nn.layer_norm",
    "F.layer_norm({0}, {1}.shape, {1}, {2}, {epsilon})",
    Code(
        relax="R.nn.layer_norm({0}, {1}, {2}, {axes}, {epsilon})",
    ),
    Gradient(all=layer_norm_gradient),
)
_define_norm(
    "nn.rms_norm",
    "norms.rms_norm({0}, {1}, {epsilon})",
    Code(
        relax="R.nn.rms_norm({0}, {1}, {axes}, {epsilon})",
        patterns=(
            f"multiply({_NORMAL.format(x='0')}, 1)",
            # Of narrow floats, as in Gemma: the weight is wide too.
            f"astype(multiply({_NORMAL.format(x=_WIDE)}, 1), dtype=dtype)",
        ),
        fused_attrs=_norm_attrs,
    ),
    Gradient(all=rms_norm_gradient),
)
# Of narrow floats, as in Llama and T5: the normalized values are rounded before they are multiplied.
_define_norm(
    "rms_norm_rounded",
    "norms.rms_norm({0}, {1}, {epsilon}, rounded=True)",
    Code(
        relax="norms.rms_norm_rounded({0}, {1}, {axes}, {epsilon})",
        patterns=(f"multiply(astype({_NORMAL.format(x=_WIDE)}, dtype=dtype), 1)",),
        fused_attrs=_norm_attrs,
    ),
    Gradient(all=rms_norm_gradient),
)


# ATen spellings


@aten("layer_norm.default")
def _layer_norm(
    g: Builder,
    x: Value,
    shape: list[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    weight = filled(g, tuple(shape), 1.0, x.tensor.dtype) if weight is None else weight
    bias = filled(g, tuple(shape), 0.0, x.tensor.dtype) if bias is None else bias
    return g.emit("nn.layer_norm", x, weight, bias, axes=_trailing_axes(x, shape), epsilon=eps)


@aten("rms_norm.default")
def _rms_norm(g: Builder, x: Value, shape: list[int], weight: Value | None = None, eps: float | None = None) -> Any:
    weight = filled(g, tuple(shape), 1.0, x.tensor.dtype) if weight is None else weight
    smallest = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}.get(x.tensor.dtype, 2.0**-23)
    epsilon = smallest if eps is None else eps
    return g.emit("nn.rms_norm", x, weight, axes=_trailing_axes(x, shape), epsilon=epsilon)


def _trailing_axes(x: Value, shape: list[int]) -> tuple[int, ...]:
    return tuple(range(len(x.tensor.shape) - len(shape), len(x.tensor.shape)))


# Relax spellings


@relax("relax.nn.layer_norm")
def _relax_layer_norm(g: Builder, args: Any, attrs: Attrs) -> Any:
    x, weight, bias = args
    weight = weight if attrs["scale"] else filled(g, weight.tensor.shape, 1.0, x.tensor.dtype)
    bias = bias if attrs["center"] else filled(g, bias.tensor.shape, 0.0, x.tensor.dtype)
    return g.emit("nn.layer_norm", x, weight, bias, axes=_last_axes(x, attrs), epsilon=attrs["epsilon"])


@relax("relax.nn.rms_norm")
def _relax_rms_norm(g: Builder, args: Any, attrs: Attrs) -> Any:
    return g.emit("nn.rms_norm", *args, axes=_last_axes(args[0], attrs), epsilon=attrs["epsilon"])


def _last_axes(x: Value, attrs: Any) -> tuple[int, ...]:
    axes, rank = axes_of(x, attrs["axes"]), len(x.tensor.shape)
    if axes != tuple(range(rank - len(axes), rank)):
        raise NotImplementedError(f"a norm over dims {axes}, which are not the last of {rank}")
    return axes


# ONNX spellings


@onnx("LayerNormalization")
def _onnx_layer_norm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    shape = list(x[0].tensor.shape[attrs.get("axis", -1) :])
    weight, bias = (_broadcast_weight(g, x, i, shape) for i in (1, 2))
    y = _layer_norm(g, x[0], shape, weight, bias, attrs.get("epsilon", 1e-5))
    if attrs["outputs"] == 1:
        return y
    axes = _trailing_axes(x[0], shape)
    mean = g.emit("mean", x[0], axis=axes, keepdims=True)
    variance = g.emit("mean", g.emit("square", g.emit("subtract", x[0], mean)), axis=axes, keepdims=True)
    epsilon = g.constant(attrs.get("epsilon", 1e-5), x[0].tensor.dtype)
    return y, mean, g.emit("rsqrt", g.emit("add", variance, epsilon))


@onnx("RMSNormalization")
def _onnx_rms_norm(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    shape = list(x[0].tensor.shape[attrs.get("axis", -1) :])
    return _rms_norm(g, x[0], shape, _broadcast_weight(g, x, 1, shape), attrs.get("epsilon", 1e-5))


def _broadcast_weight(g: Builder, x: Any, index: int, shape: list[int]) -> Any:
    """Return the scale or bias of a norm, which ONNX broadcasts to the normalized dims."""
    if not x.has(index) or list(x[index].tensor.shape) == shape:
        return x[index] if x.has(index) else None
    return g.emit("broadcast_to", x[index], shape=tuple(shape))
