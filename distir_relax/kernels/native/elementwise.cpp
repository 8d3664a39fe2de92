// Elements of a result, each computed from those of one or two operands at its place.
//
// FUNCTION: one of those below; OPERANDS: their number; NUMBER: the operand that is a number rather than a tensor, or
// -1; GATED: whether the function of the first operand, rounded to DTYPE, is multiplied with the second. A tensor's
// rows have a stride in elements, 0 for one that all share.
#include "call.h"
#include "functions.h"

constexpr float ROOT_OF_HALF = 0.7071067811865476f;

INLINE F32 add(F32 x, F32 y) { return x + y; }
INLINE F32 subtract(F32 x, F32 y) { return x - y; }
INLINE F32 multiply(F32 x, F32 y) { return x * y; }
INLINE F32 divide(F32 x, F32 y) { return x / y; }
INLINE F32 relu(F32 x, F32) { return select(x <= 0.0f, 0.0f, x); }
INLINE F32 silu(F32 x, F32) { return x * sigmoid(x); }
// Twice the share of normal numbers below x.
INLINE F32 twice_below(F32 x) { return 1.0f + erf(ROOT_OF_HALF * x); }
INLINE F32 gelu(F32 x, F32) { return 0.5f * x * twice_below(x); }
// (1 + tanh(u)) / 2 is sigmoid(2 u), without the cancellation.
INLINE F32 sigmoid_of_cubic(F32 x) { return sigmoid(1.5957691216057308f * fma(0.044715f * x * x, x, x)); }
INLINE F32 gelu_tanh(F32 x, F32) { return x * sigmoid_of_cubic(x); }

// Gradients of x, from the gradient of the result.
INLINE F32 silu_grad(F32 x, F32 grad) {
    F32 share = sigmoid(x);
    return grad * share * fma(x, 1.0f - share, 1.0f);
}
INLINE F32 gelu_grad(F32 x, F32 grad) {
    return grad * fma(0.3989422804014327f * x, exp(-0.5f * x * x), 0.5f * twice_below(x));
}
INLINE F32 gelu_tanh_grad(F32 x, F32 grad) {
    F32 share = sigmoid_of_cubic(x), slope = fma(0.21406444881780073f * x, x, 1.5957691216057308f);
    return grad * share * fma(x * (1.0f - share), slope, 1.0f);
}

static void elementwise(const DTYPE* x, int64_t x_row, const DTYPE* y, int64_t y_row, float number, DTYPE* result,
                        int64_t result_row, int64_t rows, int64_t columns, int64_t threads) {
    parallel(threads, [=](int64_t t) {
        for (int64_t r = rows * t / threads; r < rows * (t + 1) / threads; r++)
            each_vector(
                columns, BODY(int64_t j, auto count) {
                    F32 first = NUMBER == 0 ? F32(number) : load(x + r * x_row + j, count);
                    F32 second = NUMBER == 1 ? F32(number) : OPERANDS == 2 ? load(y + r * y_row + j, count) : F32(0.0f);
                    F32 value = FUNCTION(first, second);
                    if (GATED) value = rounded_to<DTYPE>(value) * second;
                    store(result + r * result_row + j, value, count);
                });
    });
}

EXPORT(elementwise)
