// v decay + x x share, in place of v, each element by itself.
#include "call.h"
#include "vector.h"

static void moving_square(float* v, const float* x, int64_t count, float decay, float share, int64_t threads) {
    int64_t vectors = divided_up(count, LANES);
    parallel(threads, [=](int64_t t) {
        int64_t begin = vectors * t / threads * LANES, end = min(vectors * (t + 1) / threads * LANES, count);
        each_vector(
            end - begin, BODY(int64_t j, auto lanes) {
                F32 value = load(x + begin + j, lanes);
                store(v + begin + j, fma(value * value, share, load(v + begin + j, lanes) * decay), lanes);
            });
    });
}
EXPORT(moving_square)
