// The gradient of normalized rows: of a layer norm if IS_CENTRED, or of an RMS norm.
//
// The mean and the deviation of a row are computed again: the row is in the first cache, where they cost little. Sums
// are in float32. The result may be the rows, or their gradient.
#include "call.h"
#include "norm.h"

static void norm_grad(const DTYPE* x, const WEIGHT_DTYPE* weight, const DTYPE* grad, DTYPE* result, int64_t rows,
                      int64_t width, float epsilon, int64_t threads) {
    parallel(threads, [=](int64_t t) {
        for (int64_t i = rows * t / threads; i < rows * (t + 1) / threads; i++) {
            const DTYPE *row = x + i * width, *of_row = grad + i * width;
            float mean = mean_of(row, width, IS_CENTRED);
            F32 totals[3];
            add_up(
                width, totals, BODY(int64_t j, auto count, F32* sums) {
                    F32 value = first_of(load(row + j, count) - mean, count);
                    F32 weighted = load(of_row + j, count) * load(weight + j, count);
                    sums[0] = fma(value, value, sums[0]);
                    sums[1] = fma(weighted, value, sums[1]);
                    if (IS_CENTRED) sums[2] = sums[2] + weighted;
                });
            float scale = scale_of(totals[0], width, epsilon), along = scale * scale * sum(totals[1]) / width;
            float centre = IS_CENTRED ? sum(totals[2]) / width : 0.0f, of_value = -along * scale,
                  of_all = -centre * scale;
            each_vector(
                width, BODY(int64_t j, auto count) {
                    F32 weighted = load(of_row + j, count) * load(weight + j, count);
                    F32 value = load(row + j, count) - mean;
                    store(result + i * width + j, fma(weighted, scale, fma(value, of_value, of_all)), count);
                });
        }
    });
}
EXPORT(norm_grad)
