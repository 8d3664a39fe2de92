// Rotation of the halves of vectors of DTYPE, each by the angle of its position. It rounds as each op of the formula
// would.
//
// `cos` and `sin` have a row for each position; strides are in elements.
#include "call.h"
#include "vector.h"

static INLINE F32 sum_of(F32 a, F32 b) { return rounded_to<DTYPE>(a) + rounded_to<DTYPE>(b); }

static void rotary(const DTYPE* x, const DTYPE* cos, const DTYPE* sin, DTYPE* result, int64_t positions, int64_t heads,
                   int64_t width, int64_t x_position, int64_t x_head, int64_t angle_position, int64_t result_position,
                   int64_t result_head, int64_t threads) {
    int64_t half = width / 2;
    parallel(threads, [=](int64_t t) {
        for (int64_t p = positions * t / threads; p < positions * (t + 1) / threads; p++)
            for (int64_t h = 0; h < heads; h++) {
                const DTYPE *from = x + p * x_position + h * x_head, *c = cos + p * angle_position;
                const DTYPE* s = sin + p * angle_position;
                DTYPE* to = result + p * result_position + h * result_head;
                each_vector(
                    half, BODY(int64_t j, auto count) {
                        F32 first = load(from + j, count), second = load(from + half + j, count);
                        F32 of_first = sum_of(first * load(c + j, count), -second * load(s + j, count));
                        F32 of_second = sum_of(second * load(c + half + j, count), first * load(s + half + j, count));
                        store(to + j, of_first, count);
                        store(to + half + j, of_second, count);
                    });
            }
    });
}
EXPORT(rotary)
