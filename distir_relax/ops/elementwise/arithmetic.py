"""Arithmetic: sums, products, quotients, remainders, powers, minimum and maximum, clipping."""

from __future__ import annotations

import math
import operator
from typing import Any

from distir_relax.ir import Value
from distir_relax.layout import DTYPES, floor_divide, maximum, minimum
from distir_relax.ops.elementwise.pointwise import (
    aten_binary,
    define_binary,
    define_unary,
    onnx_folded,
    onnx_pointwise,
)
from distir_relax.ops.table import (
    Attrs,
    Builder,
    OnnxOperands,
    aten,
    cast,
    like,
    onnx,
    onnx_as_aten,
    operands,
    promote,
    relax,
    relax_as_aten,
)


def _exact_quotient(size: Any, divisor: Any) -> Any:
    quotient = floor_divide(size, divisor)
    if quotient * divisor != size:
        raise NotImplementedError(f"a fraction: {size} / {divisor}")
    return quotient


define_binary(
    "add", "{0} + {1}", operands(0, 1), commutative=True, gradients=("g", "g"), sizes=operator.add, native=True
)  # fmt: skip
define_binary("subtract", "{0} - {1}", operands(0, 1), gradients=("g", "negative(g)"), sizes=operator.sub,
    native=True,
)  # fmt: skip
define_binary(
    "multiply", "{0} * {1}", operands(0), operands(1), commutative=True,
    gradients=("multiply(g, 1)", "multiply(g, 0)"), sizes=operator.mul, native=True,
)  # fmt: skip
define_binary(
    "divide", "{0} / {1}", operands(0), divides=True,
    gradients=("divide(g, 1)", "negative(divide(multiply(g, y), 1))"), sizes=_exact_quotient, native=True,
)  # fmt: skip
define_binary("floor_divide", "{0} // {1}", divides=True, steps=True, sizes=floor_divide)
define_binary(
    "mod", "{0} % {1}", relax="R.floor_mod({0}, {1})", divides=True,
    gradients=("g", "negative(multiply(g, floor_divide(0, 1)))"), sizes=operator.mod,
)  # fmt: skip
_ZERO_TO_POSITIVE = "logical_and(equal(0, 0.0), greater_equal(1, 0.0))"
define_binary(
    "power", "{0} ** {1}",
    gradients=(
        # With exponent 0 the power is constant, at base 0 too.
        "where(equal(1, 0.0), 0.0, multiply(g, multiply(1, power(0, subtract(1, 1.0)))))",
        # 0 ** 2 does not depend on the exponent, and the logarithm must stay finite.
        f"where({_ZERO_TO_POSITIVE}, 0.0, multiply(g, multiply(y, log(where({_ZERO_TO_POSITIVE}, 1.0, 0)))))",
    ),
)  # fmt: skip
# At the origin, where the angle is not differentiable, the gradient is 0.
_RADIUS = "where(equal(add(square(0), square(1)), 0.0), 1.0, add(square(0), square(1)))"
define_binary(
    "atan2", "torch.atan2({0}, {1})",
    gradients=(
        f"multiply(g, divide(1, {_RADIUS}))",
        f"multiply(g, divide(negative(0), {_RADIUS}))",
    ),
)  # fmt: skip
# Equal elements get half each, as in torch.
_LARGER = "where(greater({0}, {1}), g, where(equal({0}, {1}), multiply(g, 0.5), 0.0))"
define_binary(
    "maximum", "torch.maximum({0}, {1})", gradients=(_LARGER.format(0, 1), _LARGER.format(1, 0)), sizes=maximum
)
define_binary(
    "minimum", "torch.minimum({0}, {1})", gradients=(_LARGER.format(1, 0), _LARGER.format(0, 1)), sizes=minimum
)
define_unary(
    "clip", "torch.clamp({0}, {min}, {max})", "R.clip({0}, {min}, {max})", gradient="where(equal(0, y), g, 0.0)"
)


# ATen spellings

aten_binary("multiply", *(f"{name}.{kind}" for name in ("mul", "multiply", "mul_") for kind in ("Tensor", "Scalar")))
aten_binary(
    "divide",
    *(f"{name}.{kind}" for name in ("div", "divide", "true_divide", "div_") for kind in ("Tensor", "Scalar")),
    floating=True,
)
aten_binary("power", "pow.Tensor_Tensor", "pow.Scalar")
aten_binary("maximum", "maximum.default", "max.other")
aten_binary("minimum", "minimum.default", "min.other")
aten_binary("mod", "remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
aten_binary("floor_divide", "floor_divide.default", "floor_divide.Scalar")
aten_binary("atan2", "atan2.default", "arctan2.default", floating=True)


@aten("add.Tensor", "add.Scalar", "add_.Tensor", "add_.Scalar")
def _add(g: Builder, a: Any, b: Any, alpha: float = 1) -> Any:
    return g.emit("add", *_scaled(g, a, b, alpha))


@aten(*(f"{name}.{kind}" for name in ("sub", "subtract", "sub_") for kind in ("Tensor", "Scalar")))
def _sub(g: Builder, a: Any, b: Any, alpha: float = 1) -> Any:
    return g.emit("subtract", *_scaled(g, a, b, alpha))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(g: Builder, a: Any, b: Any, alpha: float = 1) -> Any:
    return g.emit("subtract", *_scaled(g, b, a, alpha))


def _scaled(g: Builder, a: Any, b: Any, alpha: float) -> list[Any]:
    a, b = promote(g, a, b)
    if alpha != 1:
        b = g.emit("multiply", b, g.constant(alpha, b.tensor.dtype))
    return [a, b]


@aten("pow.Tensor_Scalar")
def _pow(g: Builder, x: Any, exponent: float) -> Any:
    if exponent == 2:
        return g.aten("square.default", promote(g, x, exponent)[0])
    return g.emit("power", *promote(g, x, exponent))


@aten("reciprocal.default")
def _reciprocal(g: Builder, x: Any) -> Any:
    return g.emit("divide", *promote(g, 1, x, floating=True))


@aten("addcmul.default")
def _addcmul(g: Builder, x: Value, a: Any, b: Any, *, value: float = 1) -> Any:
    x, a, b = promote(g, x, a, b)
    value = value if "float" in x.tensor.dtype else int(value)
    product = g.emit("multiply", a, b)
    return g.aten("add.Tensor", x, product, alpha=value)


@aten("div.Tensor_mode")
def _div_mode(g: Builder, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return g.aten("div.Tensor", a, b)
    if rounding_mode == "floor":
        return g.emit("floor_divide", *promote(g, a, b))
    a, b = promote(g, a, b)
    if "float" in a.tensor.dtype:
        return g.emit("trunc", g.emit("divide", a, b))
    return _towards_zero(g, a, b)


def _towards_zero(g: Builder, a: Value, b: Value) -> Any:
    """Divide integers towards zero; `floor_divide` rounds down: they agree if both operands are positive."""
    sign = g.emit("multiply", g.emit("sign", a), g.emit("sign", b))
    return g.emit("multiply", sign, g.emit("floor_divide", g.emit("abs", a), g.emit("abs", b)))


@aten("fmod.Tensor", "fmod.Scalar")
def _fmod(g: Builder, a: Any, b: Any) -> Any:
    """Return the remainder with the sign of the dividend."""
    a, b = promote(g, a, b)
    rest = g.emit("multiply", g.emit("sign", a), g.emit("mod", g.emit("abs", a), g.emit("abs", b)))
    if "float" not in a.tensor.dtype:
        return rest
    # The absolute value has slope 0 at 0, but the remainder has that of the dividend.
    exact = g.emit("logical_and", g.emit("equal", a, like(g, a, 0)), g.emit("not_equal", b, like(g, b, 0)))
    return g.emit("where", exact, a, rest)


@aten("addcdiv.default")
def _addcdiv(g: Builder, x: Value, a: Any, b: Any, *, value: float = 1) -> Any:
    return g.aten("add.Tensor", x, g.aten("div.Tensor", a, b), alpha=value)


@aten("float_power.Tensor_Scalar", "float_power.Tensor_Tensor")
def _float_power(g: Builder, x: Value, exponent: Any) -> Any:
    exponent = cast(g, exponent, "float64") if isinstance(exponent, Value) else float(exponent)
    return g.emit("power", *promote(g, cast(g, x, "float64"), exponent))


@aten("logaddexp.default")
def _logaddexp(g: Builder, a: Value, b: Value) -> Any:
    """Emit ``log(exp(a) + exp(b))`` without overflow and without subtracting equal infinities."""
    least, most = g.emit("minimum", a, b), g.emit("maximum", a, b)
    negated_distance = g.emit("where", g.emit("equal", least, most), like(g, most, 0), g.emit("subtract", least, most))
    return g.emit("add", most, g.emit("log1p", g.emit("exp", negated_distance)))


@aten("xlogy.Tensor")
def _xlogy(g: Builder, a: Value, b: Value) -> Any:
    """Emit ``a log(b)``, which is zero where `a` is, unless `b` is NaN."""
    zero = like(g, a, 0)
    no_log = g.emit("logical_or", g.emit("less_equal", b, like(g, b, 0)), g.emit("equal", b, like(g, b, math.inf)))
    none = g.emit("logical_and", g.emit("equal", a, zero), no_log)
    log = g.emit("log", g.emit("where", none, like(g, b, 1), b))
    return g.emit("where", none, zero, g.emit("multiply", a, log))


@aten("logit.default")
def _logit(g: Builder, x: Value, epsilon: float | None = None) -> Any:
    if epsilon is not None:
        x = g.emit("clip", x, min=epsilon, max=1 - epsilon)
    return g.emit("log", g.emit("divide", x, g.aten("rsub.Scalar", x, 1)))


@aten("hypot.default")
def _hypot(g: Builder, a: Value, b: Value) -> Any:
    return g.emit("sqrt", g.emit("add", g.emit("square", a), g.emit("square", b)))


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(g: Builder, a: Any, b: Any, weight: Any) -> Any:
    difference = g.emit("subtract", *promote(g, b, a))
    return g.emit("add", *promote(g, a, g.emit("multiply", *promote(g, difference, weight))))


@aten("clamp.default", "clamp_.default", "clip.default", "clamp_min.default", "clamp_min_.default")
def _clamp(g: Builder, x: Value, low: float | None = None, high: float | None = None) -> Any:
    x = promote(g, x, *(n for n in (low, high) if n is not None))[0]
    bits = 8 * DTYPES[x.tensor.dtype][1]
    least, most = (0, 2**bits - 1) if x.tensor.dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    lowest, highest = (-math.inf, math.inf) if "float" in x.tensor.dtype else (least, most)
    return g.emit("clip", x, min=lowest if low is None else low, max=highest if high is None else high)


@aten("clamp_max.default", "clamp_max_.default")
def _clamp_max(g: Builder, x: Value, high: float) -> Any:
    return _clamp(g, x, None, high)


@aten("clamp_max.Tensor")
def _clamp_max_tensor(g: Builder, x: Value, high: Any) -> Any:
    return _clamp_tensor(g, x, None, high)


@aten("clamp.Tensor", "clip.Tensor", "clamp_min.Tensor")
def _clamp_tensor(g: Builder, x: Any, low: Any = None, high: Any = None) -> Any:
    """Clamp `x`; at a bound the gradient is that of `x`."""
    for name, bound in (("less", low), ("greater", high)):
        if bound is not None:
            x, bound = promote(g, x, bound)
            outside = g.emit(name, x, bound)
            if "float" in x.tensor.dtype:
                outside = g.emit("logical_or", outside, g.emit("not_equal", bound, bound))
            x = g.emit("where", outside, bound, x)
    return x


# Relax spellings


@relax("relax.clip")
def _relax_clip(g: Builder, args: Any, attrs: Attrs) -> Any:
    kind = float if "float" in args[0].tensor.dtype else int
    return g.emit("clip", args[0], min=kind(args[1]), max=kind(args[2]))


relax_as_aten("relax.floor_mod", "remainder.Tensor")


@relax("relax.mod")
def _relax_mod(g: Builder, args: Any, attrs: Attrs) -> Any:
    raise NotImplementedError("a remainder with the sign of the dividend; relax.floor_mod has that of the divisor")


# ONNX spellings

for _onnx, _name in {"Sub": "subtract", "Mul": "multiply", "Add": "add"}.items():
    onnx_pointwise(_onnx, _name)
for _onnx, _name in {"Max": "maximum", "Min": "minimum", "Sum": "add"}.items():
    onnx_folded(_onnx, _name)
onnx_as_aten("Reciprocal", "reciprocal.default")


@onnx("Div")
def _onnx_div(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    a, b = x.pointwise()
    if "float" in a.tensor.dtype:
        return g.emit("divide", a, b)
    return _towards_zero(g, a, b)


@onnx("Pow")
def _onnx_pow(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    a, b = x.pointwise()
    if x.constant_numbers(1) == [2]:
        return g.emit("square", a)
    return g.emit("power", a, cast(g, b, a.tensor.dtype))


@onnx("Mod")
def _onnx_mod(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    a, b = x.pointwise()
    if not attrs.get("fmod", 0):
        return g.emit("mod", a, b)
    return _fmod(g, a, b)


@onnx("Mean")
def _onnx_mean(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    total, *rest = x.pointwise()
    for item in rest:
        total = g.emit("add", total, item)
    return g.emit("multiply", total, g.constant(1 / len(x), total.tensor.dtype))


@onnx("Clip")
def _onnx_clip(g: Builder, x: OnnxOperands, attrs: Attrs) -> Any:
    return _clamp(g, x[0], x.number(1, attrs.get("min")), x.number(2, attrs.get("max")))
