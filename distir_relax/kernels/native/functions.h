// Functions of float32 vectors by polynomials, accurate to a few units in the last place. NaN stays NaN.
//
// The approximations are those of Cephes (exp, exp2) and Eigen (tanh, erf).
#pragma once

#include "vector.h"

constexpr float LOG2_E = 1.44269504088896340736f;

INLINE F32 clamp(F32 x, float low, float high) { return min(F32(high), max(F32(low), x)); }

template <int count> INLINE F32 polynomial(F32 x, const float (&coefficients)[count]) {
    F32 value = coefficients[0];
    UNROLL (i, count - 1) value = fma(value, x, coefficients[i + 1]);
    return value;
}

// e^x
INLINE F32 exp(F32 x) {
    static const float coefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                         4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    F32 clamped = clamp(x, -87.33f, 88.72f), exponent = nearest(clamped * LOG2_E);
    // log(2) in two parts, so that the difference is exact.
    F32 rest = fma(exponent, 2.12194440e-4f, fma(exponent, -0.693359375f, clamped));
    F32 mantissa = fma(polynomial(rest, coefficients) * rest, rest, rest) + 1.0f;
    // A power of two is its exponent's bits; in two factors, since float32 cannot represent 2^128.
    F32 value = mantissa * of_bits((to_int(exponent) + 126) << 23) * 2.0f;
    return select(x > 88.72f, x * __builtin_inff(), select(x < -87.33f, 0.0f, value));
}

// 2^x of numbers in -126..128; infinity for 128.
INLINE F32 exp2_in_range(F32 x) {
    static const float coefficients[] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                                         5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f};
    F32 exponent = nearest(x), rest = x - exponent;
    F32 value = fma(polynomial(rest, coefficients), rest, 1.0f);
    // A power of two is added to the exponent's bits.
    return of_bits(bits_of(value) + (to_int(exponent) << 23));
}

// 2^x of numbers of at most 0; 0 below -126.
INLINE F32 exp2_to_one(F32 x) {
    Mask is_zero = x < -126.0f;
    return select(is_zero, 0.0f, exp2_in_range(select(is_zero, -126.0f, x)));
}

// 1 / (1 + e^-x)
INLINE F32 sigmoid(F32 x) { return 1.0f / (1.0f + exp2_in_range(clamp(x * -LOG2_E, -126.0f, 128.0f))); }

INLINE F32 tanh(F32 x) {
    static const float top[] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                                5.12229709037114e-08f,  1.48572235717979e-05f, 6.37261928875436e-04f,
                                4.89352455891786e-03f};
    static const float bottom[] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                                   4.89352518554385e-03f};
    F32 y = clamp(x, -7.90531110763549805f, 7.90531110763549805f);
    return y * polynomial(y * y, top) / polynomial(y * y, bottom);
}

INLINE F32 erf(F32 x) {
    static const float top[] = {-2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f,
                                -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                                -1.60960333262415e-02f};
    static const float bottom[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                                   -7.37332916720468e-03f, -1.42647390514189e-02f};
    F32 y = clamp(x, -4.0f, 4.0f);
    return y * polynomial(y * y, top) / polynomial(y * y, bottom);
}
