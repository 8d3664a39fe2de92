"""Unary functions: exponentials, logarithms, roots, trigonometric functions, rounding."""

from __future__ import annotations

import math
from typing import Any

from distir_relax.ir import Value
from distir_relax.ops.elementwise.pointwise import aten_unary, define_unary, onnx_pointwise
from distir_relax.ops.table import Builder, aten, cast, like, promote

define_unary("negative", "-{0}", linear=True, gradient="negative(g)")
define_unary(
    "exp", "torch.exp({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements, gradient="multiply(g, y)"
)
define_unary(
    "log", "torch.log({0})", flops=lambda types, attrs, results: 8.0 * results[0].elements, gradient="divide(g, 0)"
)
define_unary("sqrt", "torch.sqrt({0})", gradient="divide(multiply(g, 0.5), y)")
# The square root in norms and standard deviations, with torch's gradient of 0 at 0.
define_unary(
    "safe_sqrt", "torch.sqrt({0})", "R.sqrt({0})", gradient="where(equal(y, 0.0), 0.0, divide(multiply(g, 0.5), y))"
)
define_unary("rsqrt", "torch.rsqrt({0})", gradient="multiply(multiply(g, -0.5), multiply(y, square(y)))")
define_unary("abs", "torch.abs({0})", gradient="multiply(g, sign(0))")
define_unary("square", "torch.square({0})", gradient="multiply(g, multiply(0, 2.0))")
define_unary(
    "tanh",
    "torch.tanh({0})",
    flops=lambda types, attrs, results: 8.0 * results[0].elements,
    gradient="multiply(g, subtract(1.0, square(y)))",
)
define_unary(
    "sigmoid",
    "torch.sigmoid({0})",
    flops=lambda types, attrs, results: 8.0 * results[0].elements,
    gradient="multiply(g, multiply(y, subtract(1.0, y)))",
)
define_unary(
    "erf",
    "torch.erf({0})",
    flops=lambda types, attrs, results: 8.0 * results[0].elements,
    gradient="multiply(g, multiply(1.1283791670955126, exp(negative(square(0)))))",
)
define_unary("sin", "torch.sin({0})", gradient="multiply(g, cos(0))")
define_unary("cos", "torch.cos({0})", gradient="negative(multiply(g, sin(0)))")
define_unary("floor", "torch.floor({0})", steps=True)
define_unary("ceil", "torch.ceil({0})", steps=True)
define_unary("sign", "torch.sign({0})", steps=True)
define_unary("round", "torch.round({0})", steps=True)
define_unary("trunc", "torch.trunc({0})", steps=True)
define_unary("tan", "torch.tan({0})", gradient="multiply(g, add(1.0, square(y)))")
define_unary("atan", "torch.atan({0})", gradient="divide(g, add(1.0, square(0)))")
for _name, _gradient in {
    "asin": "divide(g, sqrt(subtract(1.0, square(0))))",
    "acos": "negative(divide(g, sqrt(subtract(1.0, square(0)))))",
    "sinh": "multiply(g, cosh(0))",
    "cosh": "multiply(g, sinh(0))",
    "asinh": "divide(g, sqrt(add(square(0), 1.0)))",
    "acosh": "divide(g, sqrt(subtract(square(0), 1.0)))",
    "atanh": "divide(g, subtract(1.0, square(0)))",
}.items():
    define_unary(_name, f"torch.{_name}({{0}})", gradient=_gradient)
define_unary(
    "expm1", "torch.expm1({0})", "R.subtract(R.exp({0}), R.const(1, {0}.ty.dtype))", gradient="multiply(g, add(y, 1.0))"
)
define_unary(
    "log1p",
    "torch.log1p({0})",
    flops=lambda types, attrs, results: 8.0 * results[0].elements,
    gradient="divide(g, add(0, 1.0))",
)


# ATen spellings

for _name in ("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos"):
    aten_unary(_name, f"{_name}.default", floating=True)
aten_unary("negative", "neg.default")
aten_unary("abs", "abs.default")
aten_unary("floor", "floor.default")
aten_unary("ceil", "ceil.default")
aten_unary("sign", "sign.default")
aten_unary("round", "round.default")
aten_unary("trunc", "trunc.default")
aten_unary("tan", "tan.default", floating=True)
for _name in ("atan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "expm1", "log1p"):
    aten_unary(_name, f"{_name}.default", floating=True)


@aten("square.default")
def _square(g: Builder, x: Any) -> Any:
    return g.emit("square", cast(g, x, "int64") if x.tensor.dtype == "bool" else x)


@aten("log2.default")
def _log2(g: Builder, x: Any) -> Any:
    x = promote(g, x, floating=True)[0]
    return g.emit("multiply", g.emit("log", x), g.constant(1 / math.log(2), x.tensor.dtype))


@aten("exp2.default")
def _exp2(g: Builder, x: Value) -> Any:
    return g.emit("exp", g.emit("multiply", x, like(g, x, math.log(2))))


@aten("log10.default")
def _log10(g: Builder, x: Value) -> Any:
    return g.emit("multiply", g.emit("log", x), like(g, x, 1 / math.log(10)))


@aten("nan_to_num.default")
def _nan_to_num(
    g: Builder, x: Value, nan: float | None = None, high: float | None = None, low: float | None = None
) -> Any:
    import torch

    limits = torch.finfo(getattr(torch, x.tensor.dtype))
    y = g.emit("where", g.emit("isnan", x), like(g, x, nan or 0.0), x)
    for value, infinity in (
        (limits.max if high is None else high, math.inf),
        (limits.min if low is None else low, -math.inf),
    ):
        y = g.emit("where", g.emit("equal", x, like(g, x, infinity)), like(g, x, value), y)
    return y


# ONNX spellings

onnx_pointwise("Neg", "negative")
for _name in (
    *("exp", "log", "sqrt", "abs", "tanh", "sigmoid", "erf", "sin", "cos", "tan", "atan"),
    *("asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("floor", "ceil", "sign", "round"),
):
    onnx_pointwise(_name.title(), _name)
