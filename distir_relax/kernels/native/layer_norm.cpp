// Normalization by mean and variance, in float32. DTYPE: of rows and results; WEIGHT_DTYPE: of weight and bias.
#include "call.h"
#include "norm.h"

static void layer_norm(const DTYPE* x, const WEIGHT_DTYPE* weight, const WEIGHT_DTYPE* bias, DTYPE* result,
                       int64_t rows, int64_t width, float epsilon) {
    for (int64_t i = 0; i < rows; i++) {
        const DTYPE* row = x + i * width;
        Statistics found = statistics(row, width, epsilon, true);
        each_vector(
            width, BODY(int64_t j, auto count) {
                F32 normal = (load(row + j, count) - found.mean) * found.scale;
                store(result + i * width + j, fma(normal, load(weight + j, count), load(bias + j, count)), count);
            });
    }
}
EXPORT(layer_norm)
