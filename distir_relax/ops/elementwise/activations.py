"""Activations: entries for those that torch and Relax provide, decompositions for the others."""

from __future__ import annotations

from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.elementwise.pointwise import aten_unary, define_unary, onnx_pointwise, pointwise_rule
from distir_relax.ops.table import (
    Attrs,
    Builder,
    Code,
    Cost,
    OnnxOperands,
    Semantics,
    Split,
    Trait,
    aten,
    define,
    flops_per_result,
    gradient_of,
    like,
    onnx,
    onnx_as_aten,
    operands,
    relax_as_aten,
    reshape_to,
    same_types,
)

define_unary(
    "nn.relu",
    "F.relu({0})",
    gradient="relu_grad(y, g)",
    native=True,
)
define_unary(
    "nn.gelu",
    "elementwise.gelu({0})",
    flops=12.0,
    gradient="gelu_grad(0, g)",
    native=True,
)
define_unary(
    "nn.gelu_tanh",
    'elementwise.gelu({0}, approximate="tanh")',
    flops=12.0,
    native=True,
    # As models decompose it: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
    patterns=(
        "multiply(multiply(0, 0.5), add(tanh(multiply("
        "add(0, multiply(power(0, 3.0), 0.044715)), 0.7978845608028654)), 1.0))",
    ),
    gradient="gelu_tanh_grad(0, g)",
)
define_unary(
    "nn.silu",
    "elementwise.silu({0})",
    flops=10.0,
    gradient="silu_grad(0, g)",
    native=True,
)
# `clip` passes gradients at its bounds, torch's hardtanh does not.
define_unary(
    "nn.hardtanh",
    "F.hardtanh({0}, {min}, {max})",
    "R.clip({0}, {min}, {max})",
    gradient=lambda b: b.emit(
        "where",
        b.emit("logical_or", *(b.emit("equal", b.y(), b.number(b.attrs[bound], b.y())) for bound in ("min", "max"))),
        b.number(0.0),
        b.grad,
    ),
)


# Gradients, of the saved tensor of the forward step and the gradient of its result

define(
    "relu_grad",
    Semantics(infer=same_types, torch="torch.ops.aten.threshold_backward({1}, {0}, 0)", linear=(operands(1),)),
    Split(pointwise_rule),
    code=Code(relax="R.where(R.greater({0}, R.zeros_like({0})), {1}, R.zeros_like({1}))"),
    gradient=gradient_of(None, "relu_grad(0, g)"),
    traits={Trait.POINTWISE},
)

_DENSITY = (
    "R.multiply(R.const(0.3989422804014327, {0}.ty.dtype), "
    "R.exp(R.multiply(R.const(-0.5, {0}.ty.dtype), R.square({0}))))"
)


def _relax_gelu_tanh_grad() -> str:
    def number(value: float) -> str:
        return f"R.const({value}, {{0}}.ty.dtype)"

    cube = f"R.multiply(R.multiply(R.square({{0}}), {{0}}), {number(0.044715)})"
    tanh = f"R.tanh(R.multiply(R.add({{0}}, {cube}), {number(0.7978845608028654)}))"
    slope = f"R.add({number(0.3989422804014327)}, R.multiply(R.square({{0}}), {number(0.053516112204450186)}))"
    rest = f"R.multiply(R.multiply({{0}}, {slope}), R.subtract({number(1.0)}, R.square({tanh})))"
    return f"R.multiply({{1}}, R.add(R.multiply({number(0.5)}, R.add({number(1.0)}, {tanh})), {rest}))"


define(
    "gelu_grad",
    Semantics(infer=same_types, torch="elementwise.gelu_grad({0}, {1})", linear=(operands(1),)),
    Split(pointwise_rule),
    cost=Cost(flops=flops_per_result(16.0)),
    # The normal distribution function, and x times its density.
    code=Code(
        relax="R.multiply({1}, R.add(R.multiply(R.const(0.5, {0}.ty.dtype), R.add(R.const(1.0, {0}.ty.dtype), "
        "R.erf(R.multiply({0}, R.const(0.7071067811865476, {0}.ty.dtype))))), "
        f"R.multiply({{0}}, {_DENSITY})))"
    ),
    gradient=gradient_of(
        "multiply(multiply(g, 1), multiply(multiply(0.3989422804014327, exp(multiply(-0.5, square(0)))), "
        "subtract(2.0, square(0))))",
        "gelu_grad(0, g)",
    ),
    traits={Trait.POINTWISE},
)

_TANH = "tanh(multiply(add(0, multiply(multiply(square(0), 0), 0.044715)), 0.7978845608028654))"
# Half of the derivative of the argument of the hyperbolic tangent.
_SLOPE = "add(0.3989422804014327, multiply(square(0), 0.053516112204450186))"
define(
    "gelu_tanh_grad",
    Semantics(
        infer=same_types,
        torch='elementwise.gelu_grad({0}, {1}, approximate="tanh")',
        linear=(operands(1),),
    ),
    Split(pointwise_rule),
    cost=Cost(flops=flops_per_result(20.0)),
    code=Code(relax=_relax_gelu_tanh_grad()),
    gradient=gradient_of(
        f"multiply(multiply(multiply(g, 1), subtract(1.0, square({_TANH}))), add(multiply({_SLOPE}, 2.0), "
        f"subtract(multiply(square(0), 0.10703222440890037), "
        f"multiply(multiply(0, {_TANH}), multiply(square({_SLOPE}), 4.0)))))",
        "gelu_tanh_grad(0, g)",
    ),
    traits={Trait.POINTWISE},
)
define(
    "silu_grad",
    Semantics(infer=same_types, torch="elementwise.silu_grad({0}, {1})", linear=(operands(1),)),
    Split(pointwise_rule),
    cost=Cost(flops=flops_per_result(14.0)),
    code=Code(
        relax="R.multiply({1}, R.multiply(R.sigmoid({0}), R.add(R.const(1.0, {0}.ty.dtype), R.multiply({0}, "
        "R.subtract(R.const(1.0, {0}.ty.dtype), R.sigmoid({0}))))))"
    ),
    gradient=gradient_of(
        "multiply(multiply(multiply(g, 1), multiply(sigmoid(0), subtract(1.0, sigmoid(0)))), "
        "add(2.0, multiply(0, subtract(1.0, multiply(sigmoid(0), 2.0)))))",
        "silu_grad(0, g)",
    ),
    traits={Trait.POINTWISE},
)


# ATen spellings

aten_unary("nn.relu", "relu.default", "relu_.default")
aten_unary("nn.silu", "silu.default", "silu_.default")


@aten("gelu.default")
def _gelu(g: Builder, x: Value, approximate: str = "none") -> Any:
    return g.emit("nn.gelu_tanh" if approximate == "tanh" else "nn.gelu", x)


@aten("relu6.default", "relu6_.default")
def _relu6(g: Builder, x: Value) -> Any:
    return g.emit("nn.hardtanh", x, min=0.0, max=6.0)


@aten("hardtanh.default", "hardtanh_.default")
def _hardtanh(g: Builder, x: Value, low: float = -1.0, high: float = 1.0) -> Any:
    if "float" not in x.tensor.dtype:
        return g.aten("clamp.default", x, int(low), int(high))
    return g.emit("nn.hardtanh", x, min=float(low), max=float(high))


@aten("leaky_relu.default", "leaky_relu_.default")
def _leaky_relu(g: Builder, x: Value, slope: float = 0.01) -> Any:
    zero, factor = g.constant(0, x.tensor.dtype), g.constant(slope, x.tensor.dtype)
    return g.emit("where", g.emit("greater", x, zero), x, g.emit("multiply", x, factor))


@aten("elu.default", "elu_.default")
def _elu(g: Builder, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    zero, factor = (g.constant(n, x.tensor.dtype) for n in (0, alpha * scale))
    above = g.emit("greater", x, zero)
    # Zero in the branch that is not selected, to keep it finite; at 0 the gradient is that of the exponential.
    capped = g.emit("where", above, zero, x if input_scale == 1 else g.emit("multiply", x, like(g, x, input_scale)))
    below = g.emit("multiply", g.emit("expm1", capped), factor)
    return g.emit("where", above, x if scale == 1 else g.emit("multiply", x, like(g, x, scale)), below)


@aten("softplus.default")
def _softplus(g: Builder, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Any:
    dtype = x.tensor.dtype
    scaled = x if beta == 1 else g.emit("multiply", x, g.constant(beta, dtype))
    above = g.emit("greater", scaled, g.constant(threshold, dtype))
    # Capped, so that the branch that is not selected stays finite.
    capped = g.emit("where", above, g.constant(threshold, dtype), scaled)
    soft = g.emit("log1p", g.emit("exp", capped))
    soft = soft if beta == 1 else g.emit("divide", soft, g.constant(beta, dtype))
    return g.emit("where", above, x, soft)


@aten("hardsigmoid.default", "hardsigmoid_.default")
def _hardsigmoid(g: Builder, x: Value) -> Any:
    three, sixth = g.constant(3, x.tensor.dtype), g.constant(1 / 6, x.tensor.dtype)
    return g.emit("multiply", _relu6(g, g.emit("add", x, three)), sixth)


@aten("hardswish.default", "hardswish_.default")
def _hardswish(g: Builder, x: Value) -> Any:
    return g.emit("multiply", x, _hardsigmoid(g, x))


@aten("glu.default")
def _glu(g: Builder, x: Value, dim: int = -1) -> Any:
    axis = dim % len(x.tensor.shape)
    half = x.tensor.shape[axis] // 2
    a, b = g.emit("split", x, sizes=(half, half), axis=axis)
    return g.emit("multiply", a, g.emit("sigmoid", b))


@aten("mish.default")
def _mish(g: Builder, x: Value) -> Any:
    return g.emit("multiply", x, g.emit("tanh", g.aten("softplus.default", x)))


@aten("selu.default")
def _selu(g: Builder, x: Value) -> Any:
    """Constants of Klambauer et al., Self-Normalizing Neural Networks, 2017."""
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return _elu(g, x, alpha, scale)


@aten("celu.default")
def _celu(g: Builder, x: Value, alpha: float = 1.0) -> Any:
    return _elu(g, x, alpha, input_scale=1 / alpha)


@aten("log_sigmoid.default")
def _log_sigmoid(g: Builder, x: Value) -> Any:
    """Emit ``min(x, 0) - log(1 + exp(-|x|))`` without overflow of the exponential."""
    tail = g.emit("exp", g.emit("negative", g.emit("abs", x)))
    return g.emit("subtract", g.emit("minimum", x, like(g, x, 0)), g.emit("log1p", tail))


@aten("prelu.default")
def _prelu(g: Builder, x: Value, slope: Value) -> Any:
    wide = [1] * len(x.tensor.shape)
    if slope.tensor.elements > 1:
        wide[1] = slope.tensor.elements
    below = g.emit("multiply", x, reshape_to(g, slope, tuple(wide)))
    return g.emit("where", g.emit("greater", x, like(g, x, 0)), x, below)


@aten("threshold.default")
def _threshold(g: Builder, x: Value, limit: float, value: float) -> Any:
    return g.emit("where", g.emit("less_equal", x, like(g, x, limit)), like(g, x, value), x)


# Relax spellings

relax_as_aten("relax.nn.leakyrelu", "leaky_relu.default", "alpha")


# ONNX spellings

onnx_pointwise("Relu", "nn.relu")
onnx_as_aten("LeakyRelu", "leaky_relu.default", ("alpha", 0.01))
onnx_as_aten("Elu", "elu.default", ("alpha", 1.0))
onnx_as_aten("Gelu", "gelu.default", ("approximate", "none"))
onnx_as_aten("Softplus", "softplus.default")
onnx_as_aten("HardSwish", "hardswish.default")


@onnx("HardSigmoid")
def _onnx_hard_sigmoid(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    alpha, beta = (g.constant(attrs.get(k, n), x[0].tensor.dtype) for k, n in (("alpha", 0.2), ("beta", 0.5)))
    return g.emit("clip", g.emit("add", g.emit("multiply", x[0], alpha), beta), min=0.0, max=1.0)


@onnx("PRelu")
def _onnx_prelu(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    y, slope = x.pointwise()
    return g.emit("where", g.emit("less", y, g.constant(0, y.tensor.dtype)), g.emit("multiply", y, slope), y)


@onnx("Swish")
def _onnx_swish(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    alpha = attrs.get("alpha", 1.0)
    if alpha == 1:
        return g.emit("nn.silu", x[0])
    return g.emit("multiply", x[0], g.emit("sigmoid", g.emit("multiply", x[0], g.constant(alpha, x[0].tensor.dtype))))
