"""Polynomial float32 functions that LLVM vectorizes; the C library's are called element by element.

The approximations are those of Cephes (exp, exp2) and Eigen (tanh, erf), accurate to a few ulps.
NaN stays NaN. Other element types keep TVM's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from distir_relax.kernels.native.floats import once
from distir_relax.kernels.native.script import LANES

_TANH_TOP = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
             1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
_TANH_BOTTOM = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_ERF_TOP = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
            -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_ERF_BOTTOM = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
               -1.42647390514189e-02)  # fmt: skip
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1)  # fmt: skip


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


def exp2_to_one(x: Any) -> Any:
    """Return 2^x of a float32 TIR expression that is at most 0; 0 below -126."""
    from tvm import tirx

    value = _exp2(tirx.Select(x < _f32(-126.0), _f32(-126.0), x))
    return tirx.Select(x < _f32(-126.0), _f32(0.0), value)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x) of a float32 TIR expression."""
    return _f32(1.0) / (_f32(1.0) + _exp2(_clamp(x * _f32(-1.0 / math.log(2.0)), -126.0, 128.0)))


def _exp2(x: Any) -> Any:
    """Return 2^x of a float32 TIR expression in -126..128; infinity for 128."""
    from tvm import tirx

    def power(x: Any) -> Any:
        return once(tirx.nearbyint(x), lambda exponent: once(x - exponent, partial(mantissa, exponent)))

    def mantissa(exponent: Any, rest: Any) -> Any:
        value = _horner(rest, _EXP2) * rest + _f32(1.0)
        # A power of two is added to the exponent's bits.
        return tirx.reinterpret(
            "float32", tirx.reinterpret("int32", value) + tirx.shift_left(exponent.astype("int32"), _i32(23))
        )

    return once(x, power)


def fma(x: Any, y: Any, z: Any) -> Any:
    """Return ``x * y + z`` for vectors of `LANES` float32, TIR expressions, rounded once.

    Of a product and a sum, LLVM may round the product or not, as their surroundings allow.
    """
    from tvm import tirx

    return tirx.call_llvm_pure_intrin(f"float32x{LANES}", f"llvm.fma.v{LANES}f32", x, y, z)


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
