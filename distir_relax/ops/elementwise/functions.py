"""Unary functions: exponentials, logarithms, roots, trigonometric functions, rounding."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from distir_relax.ir import Value
from distir_relax.layout import maximum, minimum
from distir_relax.ops.elementwise.pointwise import aten_unary, define_unary, onnx_pointwise
from distir_relax.ops.table import Builder, aten, cast, like, promote

_OF_SIZES: dict[str, Callable[[Any], Any]] = {
    "abs": lambda n: maximum(n, -n),
    "square": lambda n: n * n,
    "sign": lambda n: maximum(-1, minimum(n, 1)),
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), lambda n: n),
}
"""Functions of elements that are sizes."""

define_unary("negative", "-{0}", linear=True, gradient="negative(g)", sizes=operator.neg)
for _name, _gradient in {
    "exp": "multiply(g, y)",
    "log": "divide(g, 0)",
    "log1p": "divide(g, add(0, 1.0))",
    "tanh": "multiply(g, subtract(1.0, square(y)))",
    "sigmoid": "multiply(g, multiply(y, subtract(1.0, y)))",
    "erf": "multiply(g, multiply(1.1283791670955126, exp(negative(square(0)))))",
}.items():
    define_unary(_name, f"torch.{_name}({{0}})", flops=8.0, gradient=_gradient)
for _name, _gradient in {
    "sqrt": "divide(multiply(g, 0.5), y)",
    "rsqrt": "multiply(multiply(g, -0.5), multiply(y, square(y)))",
    "abs": "multiply(g, sign(0))",
    "square": "multiply(g, multiply(0, 2.0))",
    "sin": "multiply(g, cos(0))",
    "cos": "negative(multiply(g, sin(0)))",
    "tan": "multiply(g, add(1.0, square(y)))",
    "asin": "divide(g, sqrt(subtract(1.0, square(0))))",
    "acos": "negative(divide(g, sqrt(subtract(1.0, square(0)))))",
    "atan": "divide(g, add(1.0, square(0)))",
    "sinh": "multiply(g, cosh(0))",
    "cosh": "multiply(g, sinh(0))",
    "asinh": "divide(g, sqrt(add(square(0), 1.0)))",
    "acosh": "divide(g, sqrt(subtract(square(0), 1.0)))",
    "atanh": "divide(g, subtract(1.0, square(0)))",
}.items():
    define_unary(_name, f"torch.{_name}({{0}})", gradient=_gradient, sizes=_OF_SIZES.get(_name))
for _name in ("floor", "ceil", "sign", "round", "trunc"):
    define_unary(_name, f"torch.{_name}({{0}})", steps=True, sizes=_OF_SIZES[_name])
# The square root in norms and standard deviations, with torch's gradient of 0 at 0.
define_unary(
    "safe_sqrt", "torch.sqrt({0})", "R.sqrt({0})", gradient="where(equal(y, 0.0), 0.0, divide(multiply(g, 0.5), y))"
)
define_unary(
    "expm1", "torch.expm1({0})", "R.subtract(R.exp({0}), R.const(1, {0}.ty.dtype))", gradient="multiply(g, add(y, 1.0))"
)


# ATen spellings

for _name in (
    *("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "expm1", "log1p"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
):
    aten_unary(_name, f"{_name}.default", floating=True)
aten_unary("negative", "neg.default")
for _name in ("abs", "floor", "ceil", "sign", "round", "trunc"):
    aten_unary(_name, f"{_name}.default")


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
