// w keep - size m / (sqrt(v) + floor), in place of w, each element by itself.
#include "call.h"
#include "vector.h"

static void adam_step(float* w, const float* m, const float* v, int64_t count, float keep, float size, float floor,
                      int64_t threads) {
    int64_t vectors = divided_up(count, LANES);
    parallel(threads, [=](int64_t t) {
        int64_t begin = vectors * t / threads * LANES, end = min(vectors * (t + 1) / threads * LANES, count);
        each_vector(
            end - begin, BODY(int64_t j, auto lanes) {
                int64_t i = begin + j;
                F32 change = size * (load(m + i, lanes) / (sqrt(load(v + i, lanes)) + floor));
                store(w + i, load(w + i, lanes) * keep - change, lanes);
            });
    });
}
EXPORT(adam_step)
