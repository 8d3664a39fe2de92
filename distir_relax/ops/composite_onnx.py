"""ONNX ops that are written as several entries of the table, and need none of their own."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ops.pointwise import cast
from distir_relax.ops.registry import lookup_aten, onnx_spelling
from distir_relax.ops.shape import axis_of, reshape_to


def _aten(g: Any, spelling: str, *args: Any, **kwargs: Any) -> Any:
    convert = lookup_aten(spelling)
    assert convert is not None, spelling
    return convert(g, *args, **kwargs)


def _as_aten(op_type: str, spelling: str, *attributes: tuple[str, Any]) -> None:
    """An op that is an ATen op of its first operand, with attributes in order as further arguments."""

    def convert(g: Any, x: Any, attrs: Any) -> Any:
        return _aten(g, spelling, x[0], *[attrs.get(name, default) for name, default in attributes])

    onnx_spelling(op_type)(convert)


_as_aten("Reciprocal", "reciprocal.default")
_as_aten("LeakyRelu", "leaky_relu.default", ("alpha", 0.01))
_as_aten("Elu", "elu.default", ("alpha", 1.0))
_as_aten("Softplus", "softplus.default")
_as_aten("HardSwish", "hardswish.default")


@onnx_spelling("HardSigmoid")
def _hard_sigmoid(g: Any, x: Any, attrs: Any) -> Any:
    alpha, beta = (g.constant(attrs.get(k, n), x[0].type.dtype) for k, n in (("alpha", 0.2), ("beta", 0.5)))
    return g.emit("clip", g.emit("add", g.emit("multiply", x[0], alpha), beta), min=0.0, max=1.0)


@onnx_spelling("PRelu")
def _prelu(g: Any, x: Any, attrs: Any) -> Any:
    y, slope = x.pointwise()
    return g.emit("where", g.emit("less", y, g.constant(0, y.type.dtype)), g.emit("multiply", y, slope), y)


@onnx_spelling("Swish")
def _swish(g: Any, x: Any, attrs: Any) -> Any:
    alpha = attrs.get("alpha", 1.0)
    if alpha == 1:
        return g.emit("nn.silu", x[0])
    return g.emit("multiply", x[0], g.emit("sigmoid", g.emit("multiply", x[0], g.constant(alpha, x[0].type.dtype))))


@onnx_spelling("Mod")
def _mod(g: Any, x: Any, attrs: Any) -> Any:
    a, b = x.pointwise()
    if not attrs.get("fmod", 0):
        return g.emit("mod", a, b)
    # The remainder of fmod has the sign of the dividend.
    return g.emit("multiply", g.emit("sign", a), g.emit("mod", g.emit("abs", a), g.emit("abs", b)))


@onnx_spelling("Mean")
def _mean(g: Any, x: Any, attrs: Any) -> Any:
    total, *rest = x.pointwise()
    for item in rest:
        total = g.emit("add", total, item)
    return g.emit("multiply", total, g.constant(1 / len(x), total.type.dtype))


@onnx_spelling("IsInf")
def _isinf(g: Any, x: Any, attrs: Any) -> Any:
    if attrs.get("detect_negative", 1) and attrs.get("detect_positive", 1):
        return g.emit("isinf", x[0])
    name = "less" if attrs.get("detect_negative", 1) else "greater"
    return g.emit("logical_and", g.emit("isinf", x[0]), g.emit(name, x[0], g.constant(0, x[0].type.dtype)))


# Reductions


def _reduction(op_type: str, before: str, after: str) -> None:
    def convert(g: Any, x: Any, attrs: Any) -> Any:
        y = g.emit(before, x[0]) if before else x[0]
        axes = x.numbers(1, attrs.get("axes"))
        if axes or not attrs.get("noop_with_empty_axes", 0):
            y = _aten(g, "sum.dim_IntList", y, axes, bool(attrs.get("keepdims", 1)), x[0].type.dtype)
        return g.emit(after, y) if after else y

    onnx_spelling(op_type)(convert)


_reduction("ReduceSumSquare", "square", "")
_reduction("ReduceL1", "abs", "")
_reduction("ReduceL2", "square", "sqrt")
_reduction("ReduceLogSum", "", "log")


@onnx_spelling("ReduceLogSumExp")
def _log_sum_exp(g: Any, x: Any, attrs: Any) -> Any:
    """The largest element is taken out first, so that no exponential overflows."""
    axes, keep = x.numbers(1, attrs.get("axes")), bool(attrs.get("keepdims", 1))
    if not x[0].type.elements:
        raise NotImplementedError("the largest of no elements")
    largest = _aten(g, "amax.default", x[0], axes, True)
    total = _aten(g, "sum.dim_IntList", g.emit("exp", g.emit("subtract", x[0], largest)), axes, True)
    y = g.emit("add", g.emit("log", total), largest)
    return y if keep else reshape_to(g, y, _aten(g, "amax.default", x[0], axes, False).type.shape)


@onnx_spelling("LpNormalization")
def _lp_normalization(g: Any, x: Any, attrs: Any) -> Any:
    norm = _aten(g, "linalg_vector_norm.default", x[0], attrs.get("p", 2), [attrs.get("axis", -1)], True)
    zero = g.constant(0, x[0].type.dtype)
    return g.emit("where", g.emit("equal", norm, zero), zero, g.emit("divide", x[0], norm))


# Shapes


@onnx_spelling("Tile")
def _tile(g: Any, x: Any, attrs: Any) -> Any:
    return _aten(g, "repeat.default", x[0], x.numbers(1))


@onnx_spelling("DepthToSpace")
def _depth_to_space(g: Any, x: Any, attrs: Any) -> Any:
    n, c, h, w = x[0].type.shape
    b = attrs["blocksize"]
    if attrs.get("mode", "DCR") == "DCR":
        opened, axes = (n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2)
    else:
        opened, axes = (n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3)
    y = g.emit("permute_dims", reshape_to(g, x[0], opened), axes=axes)
    return reshape_to(g, y, (n, c // b**2, h * b, w * b))


@onnx_spelling("SpaceToDepth")
def _space_to_depth(g: Any, x: Any, attrs: Any) -> Any:
    n, c, h, w = x[0].type.shape
    b = attrs["blocksize"]
    axes = (0, 3, 5, 1, 2, 4) if attrs.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    y = g.emit("permute_dims", reshape_to(g, x[0], (n, c, h // b, b, w // b, b)), axes=axes)
    return reshape_to(g, y, (n, c * b**2, h // b, w // b))


@onnx_spelling("Einsum")
def _einsum(g: Any, x: Any, attrs: Any) -> Any:
    return _aten(g, "einsum.default", attrs["equation"], [x[i] for i in range(len(x))])


# Quantised weights


@onnx_spelling("DequantizeLinear")
def _dequantize(g: Any, x: Any, attrs: Any) -> Any:
    if attrs.get("block_size", 0):
        raise NotImplementedError("scales of blocks")
    scale = x[1]
    rank, axis = len(x[0].type.shape), attrs.get("axis", 1)
    sides = [cast(g, x[0], scale.type.dtype)]
    for i in (1, 2):
        if x.has(i):
            side = cast(g, x[i], scale.type.dtype)
            wide = [1] * rank
            if side.type.elements > 1:
                wide[axis_of(axis, rank)] = side.type.elements
            sides.append(reshape_to(g, side, tuple(wide)) if side.type.shape else side)
    y = g.emit("subtract", sides[0], sides[2]) if len(sides) > 2 else sides[0]
    return g.emit("multiply", y, sides[1])


# Attention as one op


@onnx_spelling("Attention")
def _attention(g: Any, x: Any, attrs: Any) -> Any:
    """The 4-D form, (batch, head, row, dim), and the 3-D form with heads and dims in one."""
    plain = {"q_num_heads", "kv_num_heads", "is_causal", "scale", "opset", "outputs"}
    if any(x.has(i) for i in range(4, len(x))) or set(attrs) - plain or attrs["outputs"] > 1:
        raise NotImplementedError("attention with a cache, or other than a softmax of the scores")
    rows = x[0].type.shape[1]
    flat = len(x[0].type.shape) == 3
    parts = [x[i] for i in range(3)]
    if flat:
        heads = (attrs["q_num_heads"], attrs["kv_num_heads"], attrs["kv_num_heads"])
        parts = [_heads(g, part, count) for part, count in zip(parts, heads, strict=True)]
    if attrs.get("is_causal", 0) and (x.has(3) or parts[0].type.shape[2] != parts[1].type.shape[2]):
        raise NotImplementedError("causal attention with a mask of its own, or of scores that are not square")
    mask = x[3] if x.has(3) else None
    scale = attrs.get("scale", 1 / math.sqrt(parts[0].type.shape[-1]))
    arguments = (*parts, mask, 0.0, bool(attrs.get("is_causal", 0)), scale, True)
    y = _aten(g, "scaled_dot_product_attention.default", *arguments)
    if not flat:
        return y
    y = g.emit("permute_dims", y, axes=(0, 2, 1, 3))
    return reshape_to(g, y, (y.type.shape[0], rows, y.type.shape[2] * y.type.shape[3]))


def _heads(g: Any, x: Any, count: int) -> Any:
    b, s, width = x.type.shape
    return g.emit("permute_dims", reshape_to(g, x, (b, s, count, width // count)), axes=(0, 2, 1, 3))
