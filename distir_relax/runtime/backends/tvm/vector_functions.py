"""Polynomial float32 functions that LLVM vectorizes; the C library's are called element by element.

The approximations are those of Cephes (exp) and Eigen (tanh, erf), accurate to a few ulps.
NaN stays NaN. Other element types keep TVM's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_TANH_TOP = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
             1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_BOTTOM = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_ERF_TOP = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
            -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_ERF_BOTTOM = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
               -1.42647390514189e-02)  # fmt: skip
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Any) -> Any:
    """Return e^x of a TIR expression."""
    from tvm import tirx

    if str(x.ty.dtype) != "float32":
        return tirx.exp(x)
    clamped = _clamp(x, -87.33, 88.72)
    exponent = tirx.floor(clamped * _f32(1.0 / math.log(2.0)) + _f32(0.5))
    # log(2) in two parts, so that the difference is exact.
    rest = clamped - exponent * _f32(0.693359375) - exponent * _f32(-2.12194440e-4)
    mantissa = _horner(rest, _EXP) * rest * rest + rest + _f32(1.0)
    # A power of two is its exponent's bits; in two factors, since float32 cannot represent 2^128.
    power = tirx.reinterpret("float32", tirx.shift_left(exponent.astype("int32") + _i32(126), _i32(23)))
    value = mantissa * power * _f32(2.0)
    return tirx.Select(x > _f32(88.72), x * _f32(math.inf), tirx.Select(x < _f32(-87.33), _f32(0.0), value))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of a TIR expression."""
    from tvm import tirx

    if str(x.ty.dtype) != "float32":
        return tirx.tanh(x)
    y = _clamp(x, -7.90531110763549805, 7.90531110763549805)
    return y * _horner(y * y, _TANH_TOP) / _horner(y * y, _TANH_BOTTOM)


def erf(x: Any) -> Any:
    """Return the error function of a TIR expression."""
    from tvm import tirx

    if str(x.ty.dtype) != "float32":
        return tirx.erf(x)
    y = _clamp(x, -4.0, 4.0)
    return y * _horner(y * y, _ERF_TOP) / _horner(y * y, _ERF_BOTTOM)


def _clamp(x: Any, low: float, high: float) -> Any:
    from tvm import tirx

    # Comparisons with NaN are false, so NaN propagates.
    return tirx.Select(x < _f32(low), _f32(low), tirx.Select(x > _f32(high), _f32(high), x))


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    value = _f32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _f32(coefficient)
    return value


def _f32(value: float) -> Any:
    from tvm import tirx

    return tirx.const(value, "float32")


def _i32(value: int) -> Any:
    from tvm import tirx

    return tirx.const(value, "int32")
