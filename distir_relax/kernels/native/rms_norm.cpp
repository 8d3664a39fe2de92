// Normalization by the root mean square, in float32.
//
// DTYPE: of rows and results; WEIGHT_DTYPE: of the weight; ROUNDED: whether normalized rows are rounded to their type
// before they are multiplied.
#include "call.h"
#include "norm.h"

static void rms_norm(const DTYPE* x, const WEIGHT_DTYPE* weight, DTYPE* result, int64_t rows, int64_t width,
                     float epsilon, int64_t threads) {
    parallel(threads, [=](int64_t t) {
        for (int64_t i = rows * t / threads; i < rows * (t + 1) / threads; i++) {
            const DTYPE* row = x + i * width;
            float scale = statistics(row, width, epsilon, false).scale;
            each_vector(
                width, BODY(int64_t j, auto count) {
                    F32 normal = load(row + j, count) * scale;
                    if (ROUNDED) normal = rounded_to<DTYPE>(normal);
                    store(result + i * width + j, normal * load(weight + j, count), count);
                });
        }
    });
}
EXPORT(rms_norm)
