// The gradients of the weight of a norm and, if IS_CENTRED, of its bias: sums over rows, in float32.
//
// `sums` has 2 x width elements for each thread. DTYPE: of rows and their gradient; WEIGHT_DTYPE: of the results.
#include "call.h"
#include "norm.h"

static void norm_weight_grad(const DTYPE* x, const DTYPE* grad, WEIGHT_DTYPE* of_weight, WEIGHT_DTYPE* of_bias,
                             float* sums, int64_t rows, int64_t width, float epsilon, int64_t threads) {
    parallel(threads, [=](int64_t t) {
        float *weights = sums + t * 2 * width, *biases = weights + width;
        for (int64_t j = 0; j < 2 * width; j++) weights[j] = 0.0f;
        for (int64_t i = rows * t / threads; i < rows * (t + 1) / threads; i++) {
            const DTYPE *row = x + i * width, *of_row = grad + i * width;
            Statistics found = statistics(row, width, epsilon, IS_CENTRED);
            each_vector(
                width, BODY(int64_t j, auto count) {
                    F32 slope = load(of_row + j, count), normal = (load(row + j, count) - found.mean) * found.scale;
                    store(weights + j, fma(slope, normal, load(weights + j, count)), count);
                    if (IS_CENTRED) store(biases + j, load(biases + j, count) + slope, count);
                });
        }
    });
    each_vector(
        width, BODY(int64_t j, auto count) {
            F32 weight = load(sums + j, count), bias = load(sums + width + j, count);
            for (int64_t t = 1; t < threads; t++) {
                weight = weight + load(sums + t * 2 * width + j, count);
                if (IS_CENTRED) bias = bias + load(sums + (t * 2 + 1) * width + j, count);
            }
            store(of_weight + j, weight, count);
            if (IS_CENTRED) store(of_bias + j, bias, count);
        });
}
EXPORT(norm_weight_grad)
